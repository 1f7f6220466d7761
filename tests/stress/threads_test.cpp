// SPDX-License-Identifier: BSD-3-Clause
//
// Many threads on one allocator, with the device checking every access; and one thread that is
// stuck in the driver, which nobody else may notice.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/allocator.hpp"
#include "driver/meter.hpp"
#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

struct Block {
  DeviceAddr address;
  Bytes size;
  StreamInfo stream;
  std::uint64_t tag = 0;
};

// Where threads leave blocks for each other.
class Market {
 public:
  void put(const Block& b) {
    const std::lock_guard lock(mu_);
    blocks_.push_back(b);
  }
  std::optional<Block> take(std::uint64_t number) {
    const std::lock_guard lock(mu_);
    if (blocks_.empty()) return std::nullopt;
    std::swap(blocks_[static_cast<std::size_t>(number % blocks_.size())], blocks_.back());
    const Block b = blocks_.back();
    blocks_.pop_back();
    return b;
  }

 private:
  std::mutex mu_;
  std::vector<Block> blocks_;
};

constexpr std::chrono::milliseconds kLongest{1500};  // of each test below
constexpr int kRounds = 3000;

class Bench {
 public:
  explicit Bench(const Options& options) : gpu(device()), allocator(gpu, options) {
    gpu.set_manual(true);
  }
  static SimOptions device() {
    SimOptions options;
    options.capacity = 256_MiB;
    return options;
  }

  StreamInfo stream() { return {gpu.new_stream(), true}; }
  std::optional<Block> get(Bytes size, const StreamInfo& on, PoolId pool = kDefaultPool) {
    AllocRequest request;
    request.size = size;
    request.stream = on;
    request.pool = pool;
    const AllocResult result = allocator.allocate(request);
    if (!result.ok()) return std::nullopt;
    const Block b{result.address, result.size, on, tags.fetch_add(1)};
    gpu.launch(on.ref, {writes({b.address, b.size}, b.tag)});
    return b;
  }
  void read(const Block& b, const StreamInfo& on) {
    gpu.launch(on.ref, {reads({b.address, b.size}, b.tag)});
  }
  // The block is used on a stream that its own knows nothing of, and freed at once.
  void read_elsewhere(const Block& b, const StreamInfo& on) {
    const auto event = gpu.record(b.stream.ref);
    if (!event.ok()) return;
    gpu.stream_wait(on.ref, event.value());
    gpu.recycle(event.value());
    EXPECT_TRUE(allocator.record_stream(b.address, on));
    read(b, on);
  }

  // Runs `threads` of work(index), and beside them a thread that does the background's work and one
  // that lets streams get on.
  template <class Work>
  void run(int threads, Work work) {
    std::atomic<bool> over{false};
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) all.emplace_back([&, i] { work(i); });
    std::thread background([&] {
      const CallerRoleScope role(CallerRole::kBackground);
      for (std::uint64_t n = 0; !over.load(); ++n) {
        (void)allocator.maintain();
        TrimRequest request;
        request.wait = n % 3 == 0;
        request.target = n % 2 == 0 ? 64_MiB : 0_MiB;
        if (n % 50 == 0) (void)allocator.trim(request);
        if (n % 70 == 0) {
          EXPECT_EQ(allocator.validate(), std::nullopt);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    std::thread device([&] {
      while (!over.load()) {
        gpu.complete_all();
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    for (std::thread& t : all) t.join();
    over.store(true);
    background.join();
    device.join();
  }

  void expect_all_is_well() {
    gpu.complete_all();
    EXPECT_EQ(allocator.validate(), std::nullopt);
    EXPECT_EQ(static_cast<std::uint64_t>(allocator.stats().reserved_bytes.all().current),
              gpu.reserved_bytes().n);
    EXPECT_EQ(gpu.hazard_count(), 0u) << (gpu.hazard_count() == 0 ? "" : gpu.hazards().front());
  }

  SimDriver gpu;
  DeviceAllocator allocator;
  std::atomic<std::uint64_t> tags{1};
};

Bytes any_size(std::mt19937_64& random) {
  const std::uint64_t n = random();
  switch (n % 8) {
    case 0:
    case 1:
    case 2: return {1 + (n >> 8) % (64 << 10)};
    case 3:
    case 4: return {1 + (n >> 8) % (1 << 20)};
    case 5:
    case 6: return {1 + (n >> 8) % (8 << 20)};
    default: return {(1 + (n >> 8) % 6) << 21};
  }
}

void share_everything(const Options& options) {
  Bench bench(options);
  const StreamInfo shared[] = {bench.stream(), bench.stream()};
  Market market;
  const auto end = std::chrono::steady_clock::now() + kLongest;
  bench.run(6, [&](int index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index) + 1);
    const StreamInfo own = bench.stream();
    std::vector<Block> mine;
    for (int round = 0; round < kRounds && std::chrono::steady_clock::now() < end; ++round) {
      const StreamInfo& on = random() % 3 == 0 ? shared[random() % 2] : own;
      if (const auto b = bench.get(any_size(random), on)) {
        random() % 2 == 0 ? market.put(*b) : mine.push_back(*b);
      }
      if (mine.size() > 6) {
        const std::size_t n = static_cast<std::size_t>(random() % mine.size());
        bench.read(mine[n], mine[n].stream);
        bench.allocator.free(mine[n].address);
        mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(n));
      }
      if (random() % 2 == 0) {
        if (const auto b = market.take(random())) {
          if (random() % 2 == 0) bench.read_elsewhere(*b, own);
          bench.allocator.free(b->address);
        }
      }
    }
    for (const Block& b : mine) bench.allocator.free(b.address);
  });
  while (const auto b = market.take(0)) bench.allocator.free(b->address);
  bench.expect_all_is_well();
  (void)bench.allocator.trim({});
  EXPECT_EQ(bench.allocator.stats().allocated_bytes.all().current, 0);
}

TEST(Threads, ShareStreamsAndFreeForEachOther) { share_everything({}); }

TEST(Threads, LeaveWorkToTheBackgroundThread) {
  Options options;
  options.background = true;
  options.max_aliases = 2;
  share_everything(options);
}

TEST(Threads, CaptureWhileOthersMissAndFree) {
  Bench bench({});
  const auto end = std::chrono::steady_clock::now() + kLongest;
  bench.run(4, [&](int index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index) + 100);
    const StreamInfo own = bench.stream();
    std::optional<PoolId> pool;
    for (int round = 0; round < kRounds / 4 && std::chrono::steady_clock::now() < end; ++round) {
      if (index != 0) {
        const auto b = bench.get(any_size(random), own);
        if (!b) continue;
        bench.read(*b, own);
        bench.allocator.free(b->address);
        continue;
      }
      pool = bench.allocator.create_pool({});
      bench.allocator.begin_capture();
      bench.gpu.begin_capture(own.ref, CaptureMode::kGlobal);
      std::vector<Block> kept;
      for (int i = 0; i < 4; ++i) {
        const auto b = bench.get(any_size(random), own, *pool);
        if (!b) continue;
        bench.read(*b, own);
        i % 2 == 0 ? kept.push_back(*b) : bench.allocator.free(b->address);
      }
      const auto graph = bench.gpu.end_capture(own.ref);
      bench.allocator.end_capture();
      ASSERT_TRUE(graph.ok()) << "another thread's call ended the capture";
      for (int i = 0; i < 3; ++i) bench.gpu.replay_graph(graph.value(), own.ref);
      for (const Block& b : kept) bench.read(b, own);
      bench.gpu.destroy_graph(graph.value());
      for (const Block& b : kept) bench.allocator.free(b.address);
      bench.allocator.release_pool(*pool);
    }
  });
  bench.expect_all_is_well();
}

// A35: eight threads and eight devices; one thread hangs in one device's create().
TEST(Threads, NobodyWaitsForAThreadThatIsStuckInTheDriver) {
  constexpr int kDevices = 8, kThreads = 8, kPairs = 300;
  std::mutex mu;
  std::condition_variable changed;
  bool stuck = false, let_go = false;
  int done = 0;

  std::vector<std::unique_ptr<SimDriver>> gpus;
  std::vector<std::unique_ptr<DeviceAllocator>> allocators;
  std::vector<std::vector<StreamInfo>> streams;
  const auto pair = [&](int device, int thread, Bytes size) {
    AllocRequest request;
    request.size = size;
    request.stream = streams[static_cast<std::size_t>(device)][static_cast<std::size_t>(thread)];
    DeviceAllocator& allocator = *allocators[static_cast<std::size_t>(device)];
    const AllocResult result = allocator.allocate(request);
    if (result.ok()) allocator.free(result.address);
    return result.ok();
  };
  for (int d = 0; d < kDevices; ++d) {
    SimOptions options;
    options.capacity = 1_GiB;
    options.device = static_cast<std::uint32_t>(d);
    gpus.push_back(std::make_unique<SimDriver>(options));
    allocators.push_back(std::make_unique<DeviceAllocator>(*gpus.back(), Options{}));
    streams.emplace_back();
    for (int t = 0; t <= kThreads; ++t) {
      streams.back().push_back({gpus.back()->new_stream(), true});
      // What later requests hit: free memory on a handle that a live block keeps where it is.
      AllocRequest request;
      request.size = 1_KiB;
      request.stream = streams.back().back();
      ASSERT_TRUE(allocators.back()->allocate(request).ok());
    }
  }

  gpus[0]->set_call_hook([&](DriverCall call) {
    if (call != DriverCall::kCreate) return;
    std::unique_lock lock(mu);
    stuck = true;
    changed.notify_all();
    changed.wait(lock, [&] { return let_go; });
  });
  std::thread unlucky([&] { EXPECT_TRUE(pair(0, kThreads, 200_MiB)); });
  {
    std::unique_lock lock(mu);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return stuck; }));
  }

  std::vector<std::thread> others;
  for (int t = 0; t < kThreads; ++t) {
    others.emplace_back([&, t] {
      for (int i = 0; i < kPairs; ++i) {
        for (int d = 0; d < kDevices; ++d) {
          // On the same device hits; on the others whatever comes.
          const std::uint64_t mib = d == 0 ? 1 : 1 + static_cast<std::uint64_t>(i) % 9;
          EXPECT_TRUE(pair(d, t, 1_MiB * mib));
        }
      }
      const std::lock_guard lock(mu);
      ++done;
      changed.notify_all();
    });
  }
  {
    std::unique_lock lock(mu);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return done == kThreads; }))
        << done << " of " << kThreads << " threads got on while one was stuck";
    let_go = true;
    changed.notify_all();
  }
  unlucky.join();
  for (std::thread& t : others) t.join();
  gpus[0]->set_call_hook({});
  for (const auto& allocator : allocators) EXPECT_EQ(allocator->validate(), std::nullopt);
}

}  // namespace
}  // namespace gpumemx
