// SPDX-License-Identifier: BSD-3-Clause
//
// Threads that mostly take and free small blocks, so that they meet in the fronts: on own streams and on
// one, with frees by other threads, while another one looks at the books, trims, and announces streams.
// The device checks the contents of every block.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLongest{1500};
constexpr int kThreads = 4;
constexpr int kRounds = 20000;
constexpr std::array kSizes{Bytes{512},   Bytes{1024},   Bytes{4096},
                            Bytes{20000}, Bytes{100000}, Bytes{700000}};

struct Held {
  DeviceAddr address;
  Bytes size;
  StreamInfo stream;
  std::uint64_t tag = 0;
};

// One block at a time goes from each thread to the next.
struct Handover {
  std::mutex mu;
  std::optional<Held> held;
};

class FrontThreads : public ::testing::Test {
 protected:
  static SimOptions device() {
    SimOptions options;
    options.capacity = 512_MiB;
    return options;
  }
  FrontThreads() : gpu_(device()), allocator_(gpu_, {}) {}

  StreamInfo new_stream() { return {gpu_.new_stream(), true}; }
  AllocResult ask(Bytes size, const StreamInfo& stream, std::uint64_t tag = 0) {
    return allocator_.allocate({size, stream, kDefaultPool, tag, nullptr});
  }
  Held get(Bytes size, const StreamInfo& stream) {
    const std::uint64_t tag = tags_.fetch_add(1);
    const AllocResult got = ask(size, stream, tag);
    EXPECT_TRUE(got.ok());
    gpu_.launch(stream.ref, {writes({got.address, size}, tag)});
    return {got.address, size, stream, tag};
  }
  void put(const Held& held) {
    gpu_.launch(held.stream.ref, {reads({held.address, held.size}, held.tag)});
    allocator_.free(held.address);
  }

  // Each thread keeps some blocks; every fourth is freed by the next thread, and some are used on
  // another stream.
  void work(int index, const StreamInfo& own, const StreamInfo& side) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index) + 1);
    const auto end = Clock::now() + kLongest;
    std::vector<Held> mine;
    for (int round = 0; round < kRounds && Clock::now() < end; ++round) {
      const bool is_large = random() % 64 == 0;
      mine.push_back(get(is_large ? 3_MiB : kSizes[random() % kSizes.size()], own));
      if (mine.size() < 12) continue;
      std::swap(mine[random() % mine.size()], mine.back());
      Held held = mine.back();
      mine.pop_back();
      if (random() % 2000 == 0) {
        EXPECT_TRUE(allocator_.record_stream(held.address, side));
      }
      if (random() % 4 != 0) {
        put(held);
        continue;
      }
      std::optional<Held> other = held;
      {
        Handover& next = handovers_[static_cast<std::size_t>(index + 1) % kThreads];
        const std::lock_guard lock(next.mu);
        std::swap(next.held, other);
      }
      if (other) put(*other);
    }
    for (const Held& held : mine) put(held);
  }

  // Looks at everything that others are changing, and at a block that nobody else frees.
  void look(const StreamInfo& stream, const std::atomic<bool>& over) {
    for (int n = 0; !over; ++n) {
      const Stats s = allocator_.stats();
      for (const StatArray* a : {&s.allocation, &s.allocated_bytes, &s.requested_bytes}) {
        EXPECT_GE(a->all().current, 0);
        EXPECT_LE(a->all().current, a->all().peak);
      }
      EXPECT_LE(s.allocated_bytes.all().current, s.active_bytes.all().current);
      EXPECT_LE(s.active_bytes.all().current, s.reserved_bytes.all().current);
      const Held held = get(kSizes[static_cast<std::size_t>(n) % kSizes.size()], stream);
      EXPECT_EQ(allocator_.find_block(held.address)->tag, held.tag);
      put(held);
      EXPECT_FALSE(allocator_.free_if_live(held.address));
      if (n % 7 == 0) (void)allocator_.layout();
      if (n % 11 == 0) {
        EXPECT_EQ(allocator_.validate(), std::nullopt);
      }
      if (n % 13 == 0) (void)allocator_.trim({std::nullopt, {}, n % 2 == 0});
      if (n % 17 == 0) allocator_.reset_peaks();
      if (n % 19 == 0) {
        allocator_.record_history(100);
        std::this_thread::yield();
        allocator_.record_history(0);
      }
      gpu_.complete_all();
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  }

  // The short way is open again after all that closed it for a while.
  void expect_the_fronts_serve(const StreamInfo& stream) {
    put(get(1_KiB, stream));
    const std::uint64_t before = allocator_.stats().paths.front_hits;
    const Held held = get(1_KiB, stream);
    put(held);
    put(get(1_KiB, stream));
    EXPECT_GT(allocator_.stats().paths.front_hits, before);
  }

  void run(const std::vector<StreamInfo>& streams) {
    const StreamInfo side = new_stream(), looks = new_stream();
    std::atomic<bool> over{false};
    std::thread looker([&] { look(looks, over); });
    std::thread device([&] {
      while (!over) {
        gpu_.complete_all();
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      const StreamInfo own = streams[static_cast<std::size_t>(i) % streams.size()];
      threads.emplace_back([this, i, own, side] { work(i, own, side); });
    }
    for (std::thread& t : threads) t.join();
    over = true;
    looker.join();
    device.join();
    for (Handover& h : handovers_) {
      if (h.held) put(*h.held);
    }
    gpu_.complete_all();
    (void)allocator_.trim({});
    expect_the_fronts_serve(looks);
    EXPECT_EQ(allocator_.validate(), std::nullopt);
    const Stats s = allocator_.stats();
    EXPECT_EQ(s.allocated_bytes.all().current, 0);
    EXPECT_EQ(s.requested_bytes.all().current, 0);
    EXPECT_EQ(s.active.all().current, 0);
    EXPECT_GT(s.paths.front_hits, 100u);
    EXPECT_EQ(gpu_.hazard_count(), 0u) << (gpu_.hazard_count() == 0 ? "" : gpu_.hazards().front());
  }

  SimDriver gpu_;
  DeviceAllocator allocator_;
  std::atomic<std::uint64_t> tags_{1};
  std::array<Handover, kThreads> handovers_;
};

TEST_F(FrontThreads, OnOwnStreams) {
  gpu_.set_manual(true);
  run({new_stream(), new_stream(), new_stream(), new_stream()});
}

TEST_F(FrontThreads, OnOneStream) {
  gpu_.set_manual(true);
  run({new_stream()});
}

// What is counted is exact when all have come to rest; the peak lies between the true one and the sum
// of the streams' own.
TEST_F(FrontThreads, CountEveryRequestAndBoundThePeak) {
  constexpr int kPairs = 20000;
  constexpr std::uint64_t kAlive = 5;
  std::vector<StreamInfo> streams;
  for (int i = 0; i < kThreads; ++i) {
    streams.push_back(new_stream());
    ASSERT_TRUE(ask(512_B, streams.back()).ok());
  }
  const Stats before = allocator_.stats();
  allocator_.reset_peaks();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::array<DeviceAddr, kAlive> live{};
      for (std::size_t n = 0; n < kPairs; ++n) {
        DeviceAddr& slot = live[n % kAlive];
        if (slot.n != 0) allocator_.free(slot);
        slot = ask(4_KiB, streams[static_cast<std::size_t>(i)]).address;
      }
      for (const DeviceAddr a : live) allocator_.free(a);
    });
  }
  for (std::thread& t : threads) t.join();
  const Stats after = allocator_.stats();
  const auto bytes = [](std::uint64_t blocks) { return static_cast<std::int64_t>(blocks * 4096); };
  const Stat& live = after.allocated_bytes.all();
  EXPECT_EQ(live.current, before.allocated_bytes.all().current);
  EXPECT_EQ(live.allocated - before.allocated_bytes.all().allocated,
            bytes(std::uint64_t{kThreads} * kPairs));
  EXPECT_GE(live.peak - live.current, bytes(kAlive));
  EXPECT_LE(live.peak - live.current, bytes(kAlive * kThreads));
  EXPECT_EQ(allocator_.validate(), std::nullopt);
}

// A free of what is free already is refused, whoever comes first.
TEST_F(FrontThreads, OneOfTwoFreesOfABlockIsRefused) {
  const StreamInfo stream = new_stream();
  for (int round = 0; round < 500; ++round) {
    const DeviceAddr a = ask(4_KiB, stream).address;
    std::atomic<int> freed{0};
    std::array<std::thread, 2> threads;
    for (std::thread& t : threads) {
      t = std::thread([&] { freed += allocator_.free_if_live(a) ? 1 : 0; });
    }
    for (std::thread& t : threads) t.join();
    ASSERT_EQ(freed, 1);
  }
  EXPECT_EQ(allocator_.stats().allocated_bytes.all().current, 0);
}

}  // namespace
}  // namespace gpumemx
