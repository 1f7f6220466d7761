// SPDX-License-Identifier: BSD-3-Clause
//
// What the tests of the core write again and again: a simulated device of a given size with an
// allocator on it, and a look at both.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"
#include "support/sim_tools.hpp"

namespace gpumemx {

// So that a failed comparison shows numbers.
inline void PrintTo(Bytes size, std::ostream* out) { *out << size.n; }
inline void PrintTo(DeviceAddr address, std::ostream* out) {
  *out << std::hex << address.n << std::dec;
}

inline SimOptions device_of(Bytes capacity) {
  SimOptions options;
  options.capacity = capacity;
  return options;
}

inline StreamInfo permanent(StreamRef stream) { return {stream, true}; }
inline StreamInfo temporary(StreamRef stream) { return {stream, false}; }

// Signed, as figures are.
inline std::int64_t n(Bytes size) { return static_cast<std::int64_t>(size.n); }

// current / peak / allocated / freed of one figure.
struct Four {
  std::int64_t current, peak, allocated, freed;
  friend bool operator==(const Four&, const Four&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Four& f) {
    return out << f.current << " / " << f.peak << " / " << f.allocated << " / " << f.freed;
  }
};
inline Four four(const StatArray& a, StatArray::Part part = StatArray::kAll) {
  const Stat& s = a.part[part];
  return {s.current, s.peak, s.allocated, s.freed()};
}

// An allocator on a simulated device. At the end of each test the books must be in order, nothing
// may have happened that the driver's rules forbid, and all memory must be back.
class AllocatorTest : public ::testing::Test {
 protected:
  explicit AllocatorTest(SimOptions device = device_of(16_GiB), Options options = {})
      : gpu_(device), main_(gpu_.default_stream()) {
    start(options);
  }
  ~AllocatorTest() override {
    if (allocator_ != nullptr) {
      EXPECT_EQ(allocator_->validate().value_or(""), "");
      allocator_.reset();
      EXPECT_TRUE(gpu_.empty());
    }
    EXPECT_EQ(joined_hazards(gpu_), "");
  }

  // A new allocator with these options.
  // Without the cushion of small programs, which tests are: they would grow instead of moving memory.
  void start(Options options) {
    options.cushion = cushion_;
    allocator_.reset();
    allocator_ = std::make_unique<DeviceAllocator>(gpu_, options);
    gpu_.reset_meter();
  }

  AllocResult try_alloc(Bytes size, const StreamInfo& stream, PoolId pool = kDefaultPool) {
    return allocator_->allocate({size, stream, pool, /*tag=*/0, /*context=*/nullptr});
  }
  AllocResult try_alloc(Bytes size) { return try_alloc(size, permanent(main_)); }

  DeviceAddr alloc(Bytes size, const StreamInfo& stream, PoolId pool = kDefaultPool) {
    AllocResult got = try_alloc(size, stream, pool);
    EXPECT_TRUE(got.ok()) << (got.ok() ? "" : got.failure->text());
    EXPECT_EQ(allocator_->validate().value_or(""), "");
    return got.address;
  }
  DeviceAddr alloc(Bytes size) { return alloc(size, permanent(main_)); }
  std::vector<DeviceAddr> alloc_many(int count, Bytes size) {
    std::vector<DeviceAddr> out;
    for (int i = 0; i < count; ++i) out.push_back(alloc(size));
    return out;
  }
  void free(DeviceAddr a) {
    allocator_->free(a);
    EXPECT_EQ(allocator_->validate().value_or(""), "");
  }
  void free(const std::vector<DeviceAddr>& all) {
    for (const DeviceAddr a : all) free(a);
  }

  Stats stats() const { return allocator_->stats(); }
  PathCounts paths() const { return allocator_->stats().paths; }
  Bytes reserved() const {
    return {static_cast<std::uint64_t>(stats().reserved_bytes.all().current)};
  }
  std::uint64_t calls(DriverCall call) const { return gpu_.meter().count(call); }
  // Every call that changes what stands where.
  std::uint64_t mapping_calls() const {
    return calls(DriverCall::kCreate) + calls(DriverCall::kMap) + calls(DriverCall::kSetAccess) +
           calls(DriverCall::kUnmap) + calls(DriverCall::kRelease);
  }
  StreamInfo new_stream() { return permanent(gpu_.new_stream()); }

  double cushion_ = 0;
  SimDriver gpu_;
  const StreamRef main_;
  std::unique_ptr<DeviceAllocator> allocator_;
};

}  // namespace gpumemx
