// SPDX-License-Identifier: BSD-3-Clause
//
// What the allocator itself costs on the host, path by path. The device is simulated and charges
// nothing to the clock that is measured, so driver time is not in these figures. Each benchmark holds
// a counter that must not move: a path that is not the one meant would be measured otherwise.
#include <random>
#include <string>
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
