// SPDX-License-Identifier: BSD-3-Clause
//
// What the allocator itself costs on the host, path by path. The device is simulated and charges
// nothing to the clock that is measured, so driver time is not in these figures. Each benchmark holds
// a counter that must not move: a path that is not the one meant would be measured otherwise.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <ctime>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"
#include "support/catch.hpp"

namespace gpumemx {
namespace {

SimOptions device() {
  SimOptions options;
  options.capacity = 64_GiB;
  options.check_hazards = false;
  return options;
}

struct Bench {
  DeviceAddr alloc(Bytes size, const StreamInfo& stream) {
    const AllocResult got = allocator.allocate({size, stream, kDefaultPool, 0, nullptr});
    if (!got.ok()) FAIL("out of memory");  // no assertion of Catch on the way that is measured
    return got.address;
  }
  DeviceAddr alloc(Bytes size) { return alloc(size, main); }
  std::uint64_t count(DriverCall call) const { return gpu.meter().count(call); }
  PathCounts paths() const { return allocator.stats().paths; }

  SimDriver gpu{device()};
  DeviceAllocator allocator{gpu, {}};
  const StreamInfo main{gpu.default_stream(), true};
};

TEST_CASE("a hit and its free") {
  for (const Bytes size : {512_B, 64_KiB, 20_MiB, 512_MiB}) {
    Bench b;
    b.allocator.free(b.alloc(size));
    const std::uint64_t misses = b.paths().misses;
    BENCHMARK("hit + free, " + std::to_string(size.n) + " B") { b.allocator.free(b.alloc(size)); };
    REQUIRE(b.paths().misses == misses);
    REQUIRE(b.count(DriverCall::kCreate) == b.paths().created);
  }
}

// As training does it: the oldest block goes, one of another size comes.
TEST_CASE("sizes that come by turns") {
  const auto measure = [](const std::string& name, const std::vector<Bytes>& sizes,
                          std::size_t alive) {
    Bench b;
    std::vector<DeviceAddr> live(alive);
    std::size_t turn = 0;
    const auto one = [&] {
      DeviceAddr& slot = live[turn % alive];
      if (slot.n != 0) b.allocator.free(slot);
      slot = b.alloc(sizes[turn++ % sizes.size()]);
    };
    for (int i = 0; i < 20000; ++i) one();
    const auto created = b.paths().created;
    BENCHMARK("free + allocate, " + name) { one(); };
    REQUIRE(b.paths().created == created);
  };
  measure("small, 64 alive", {512_B, 1_KiB, 4_KiB, 20000_B, 100000_B, 700000_B}, 64);
  measure("large, 16 alive", {3_MiB, 8_MiB, 25_MiB, 64_MiB, 130_MiB}, 16);
}

// One block is freed and one of another size allocated, over and over, as many as a training step has.
TEST_CASE("random sizes and lifetimes") {
  for (const std::uint64_t largest : {1u << 20, 64u << 20}) {
    Bench b;
    std::mt19937 random(1);
    const auto size = [&] { return Bytes{1 + random() % largest}; };
    std::vector<DeviceAddr> live;
    for (int i = 0; i < 1000; ++i) live.push_back(b.alloc(size()));
    const auto one = [&] {
      DeviceAddr& slot = live[random() % live.size()];
      b.allocator.free(slot);
      slot = b.alloc(size());
    };
    for (int i = 0; i < 20000; ++i) one();
    const auto reserved = b.allocator.stats().reserved_bytes.all().current;
    BENCHMARK("free + allocate, up to " + std::to_string(largest >> 20) + " MiB") { one(); };
    const Stats s = b.allocator.stats();
    const double hits = static_cast<double>(s.paths.hits);
    WARN("hits: " << 100 * hits / (hits + static_cast<double>(s.paths.misses)) << " %");
    REQUIRE(static_cast<double>(s.reserved_bytes.all().current) <
            1.05 * static_cast<double>(reserved));
  }
}

// The same with as many small sizes as large ones, of 512 B to 16 MiB: as many of each octave. What it
// does is drawn before, so that only the allocator is measured.
TEST_CASE("random sizes of every octave") {
  struct Turn {
    std::size_t slot;
    Bytes size;
  };
  constexpr std::size_t kAlive = 200, kTurns = 1u << 16;
  std::mt19937 random(1);
  std::vector<Turn> turns;
  for (std::size_t i = 0; i < kTurns; ++i) {
    const double share = static_cast<double>(random()) / 4294967296.0;
    const double size = 512 * std::pow(2.0, 15 * share);
    turns.push_back({random() % kAlive, Bytes{static_cast<std::uint64_t>(size)}});
  }
  Bench b;
  std::vector<DeviceAddr> live(kAlive);
  std::size_t next = 0;
  const auto one = [&] {
    const Turn& turn = turns[next++ % kTurns];
    DeviceAddr& slot = live[turn.slot];
    if (slot.n != 0) b.allocator.free(slot);
    slot = b.alloc(turn.size);
  };
  for (int i = 0; i < 100000; ++i) one();
  const PathCounts before = b.paths();
  BENCHMARK("free + allocate, 512 B to 16 MiB, 200 alive") { one(); };
  const PathCounts after = b.paths();
  const double hits = static_cast<double>(after.hits - before.hits);
  REQUIRE(hits > 0.999 * (hits + static_cast<double>(after.misses - before.misses)));
}

// Two heaps want the same memory by turns: it is mapped at both places.
TEST_CASE("a miss that switches aliases") {
  Bench b;
  const Bytes pages = 64_MiB, big = 64_MiB - 512_KiB;
  for (int i = 0; i < 3; ++i) {
    b.allocator.free(b.alloc(pages));
    b.allocator.free(b.alloc(big));
  }
  const std::uint64_t maps = b.count(DriverCall::kMap), unmaps = b.count(DriverCall::kUnmap);
  const std::uint64_t switches = b.paths().alias_switches;
  BENCHMARK("two blocks of four handles by alias switch, and their frees") {
    b.allocator.free(b.alloc(pages));
    b.allocator.free(b.alloc(big));
  };
  REQUIRE(b.paths().alias_switches > switches);
  REQUIRE(b.count(DriverCall::kMap) == maps);
  REQUIRE(b.count(DriverCall::kUnmap) == unmaps);
}

// Each stream takes the memory that the one before it has freed: with one address a handle, every time
// it is unmapped and mapped.
TEST_CASE("a miss that harvests") {
  SimDriver gpu(device());
  Options options;
  options.max_aliases = 1;
  DeviceAllocator allocator(gpu, options);
  const StreamInfo one{gpu.default_stream(), true}, two{gpu.new_stream(), true};
  const auto turn = [&](const StreamInfo& stream) {
    const AllocResult got = allocator.allocate({64_MiB, stream, kDefaultPool, 0, nullptr});
    if (!got.ok()) FAIL("out of memory");
    allocator.free(got.address);
  };
  for (int i = 0; i < 3; ++i) {
    turn(one);
    turn(two);
  }
  const std::uint64_t creates = gpu.meter().count(DriverCall::kCreate);
  const std::uint64_t harvested = allocator.stats().paths.harvested_other;
  BENCHMARK("two blocks of four handles by harvest, and their frees") {
    turn(one);
    turn(two);
  };
  REQUIRE(allocator.stats().paths.harvested_other > harvested);
  REQUIRE(gpu.meter().count(DriverCall::kCreate) == creates);
  REQUIRE(gpu.reserved_bytes() == 64_MiB);
}

// --- threads. The time is the processor's, of the threads themselves: it says what a pair costs also
// where there are more threads than cores. What they cost each other by waiting is not in it.

double processor_ns() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

// The highest of the threads' times for a pair.
double ns_a_pair(Bench& b, const std::vector<StreamInfo>& streams, int pairs) {
  constexpr std::array kSizes{512_B, 1_KiB, 4_KiB, 20000_B, 100000_B, 700000_B};
  std::vector<double> each(streams.size());
  std::atomic<std::size_t> ready{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < streams.size(); ++t) {
    threads.emplace_back([&, t] {
      std::array<DeviceAddr, 64> live{};
      std::size_t turn = t;
      const auto run = [&](int count) {
        for (int i = 0; i < count; ++i, ++turn) {
          DeviceAddr& slot = live[turn % live.size()];
          if (slot.n != 0) b.allocator.free(slot);
          slot = b.alloc(kSizes[turn % kSizes.size()], streams[t]);
        }
      };
      run(pairs / 10);
      for (ready.fetch_add(1); ready.load() < streams.size();) std::this_thread::yield();
      const double begin = processor_ns();
      run(pairs);
      each[t] = (processor_ns() - begin) / pairs;
      for (const DeviceAddr a : live) b.allocator.free(a);
    });
  }
  for (std::thread& t : threads) t.join();
  return *std::max_element(each.begin(), each.end());
}

TEST_CASE("threads") {
  for (const int count : {1, 4, 16}) {
    for (const bool one_stream : {false, true}) {
      Bench b;
      std::vector<StreamInfo> streams(static_cast<std::size_t>(count), b.main);
      for (StreamInfo& stream : streams) {
        if (!one_stream) stream = {b.gpu.new_stream(), true};
      }
      const double ns = ns_a_pair(b, streams, 100000);
      WARN(count << " threads, " << (one_stream ? "one stream" : "own streams") << ": " << ns
                 << " ns of processor time a pair");
      const PathCounts paths = b.paths();
      REQUIRE(paths.misses < 100 * streams.size());
      REQUIRE(paths.hits + paths.misses == streams.size() * 110000);
    }
  }
}

// One thread allocates, another one frees; each waits for the other, outside of the time.
TEST_CASE("frees by another thread") {
  Bench b;
  constexpr int kRounds = 2000;
  std::array<DeviceAddr, 64> blocks{};
  std::atomic<int> round{0};  // even: blocks are wanted; odd: they are there
  const auto wait_for = [&](int value) {
    while (round.load(std::memory_order_acquire) != value) std::this_thread::yield();
  };
  double freeing = 0, allocating = 0;
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      wait_for(2 * i + 1);
      const double begin = processor_ns();
      for (const DeviceAddr a : blocks) b.allocator.free(a);
      freeing += processor_ns() - begin;
      round.fetch_add(1, std::memory_order_release);
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    const double begin = processor_ns();
    for (DeviceAddr& a : blocks) a = b.alloc(4_KiB);
    allocating += processor_ns() - begin;
    round.fetch_add(1, std::memory_order_release);
    wait_for(2 * i + 2);
  }
  other.join();
  constexpr double kBlocks = 64.0 * kRounds;
  WARN("allocate " << allocating / kBlocks << " ns, free by another thread " << freeing / kBlocks
                   << " ns");
  REQUIRE(b.paths().misses == 1);
}

TEST_CASE("record_stream") {
  Bench b;
  const StreamInfo other{b.gpu.new_stream(), true};
  b.allocator.free(b.alloc(1_MiB));
  const std::uint64_t misses = b.paths().misses;
  BENCHMARK("hit + record_stream + free, the other stream done") {
    const DeviceAddr a = b.alloc(1_MiB);
    b.allocator.record_stream(a, other);
    b.allocator.free(a);
  };
  REQUIRE(b.paths().misses == misses);
}

}  // namespace
}  // namespace gpumemx
