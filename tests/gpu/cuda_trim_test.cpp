// SPDX-License-Identifier: BSD-3-Clause
//
// What the books say is reserved is what the device says is gone, and trim() brings it back.
#include <algorithm>
#include <thread>
#include <vector>

#include "churn.hpp"

namespace gpumemx {
namespace {

constexpr std::int64_t kTolerance = 1 << 20;

class CudaTrim : public CudaTest {
 protected:
  std::int64_t free_now() {
    const auto memory = driver_->memory();
    EXPECT_TRUE(memory.ok());
    return memory.ok() ? static_cast<std::int64_t>(memory.value().free.n) : 0;
  }
  // What the device says is gone since `base`, less what the books say. Others may use the device
  // too: a difference must be there twice.
  std::int64_t difference(std::int64_t base) {
    std::int64_t last = 0;
    for (int attempt = 0; attempt < 2; ++attempt) {
      last = base - free_now() - static_cast<std::int64_t>(reserved().n);
      if (std::abs(last) < kTolerance) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return last;
  }
};

TEST_F(CudaTrim, ReservedIsWhatTheDeviceSaysIsGone) {
  const std::vector<StreamInfo> streams = {permanent(lab_->new_stream()),
                                           permanent(lab_->new_stream())};
  {  // What the first work costs the device is not the allocator's.
    Churn first(*lab_, *allocator_, streams, 40);
    first.run(200);
    first.free_all();
  }
  (void)allocator_->trim({});
  ASSERT_EQ(reserved().n, 0u);
  const std::int64_t base = free_now();

  Churn churn(*lab_, *allocator_, streams, 41);
  std::mt19937 random(42);
  std::int64_t worst = 0;
  std::uint64_t released = 0;
  for (int moment = 0; moment < 100 && !HasFailure(); ++moment) {
    churn.run(static_cast<int>(5 + random() % 40));
    if (moment % 4 == 3) {
      const TrimReport report =
          allocator_->trim({std::nullopt, moment % 8 == 3 ? 1_GiB : 0_B, /*wait=*/moment % 3 != 0});
      released += report.released.n;
      EXPECT_EQ(report.live + report.held + report.pending + report.pools + report.wanted,
                reserved());
    }
    const std::int64_t off = difference(base);
    EXPECT_LT(std::abs(off), kTolerance) << "at moment " << moment;
    if (std::abs(off) > std::abs(worst)) worst = off;
  }
  churn.free_all();
  const TrimReport last = allocator_->trim({});
  EXPECT_GT(last.released.n, 0u);
  EXPECT_EQ(reserved().n, 0u);
  EXPECT_LT(std::abs(difference(base)), kTolerance);
  std::printf("  at 100 moments at most %lld bytes off; %llu MiB given back on the way\n",
              static_cast<long long>(worst), static_cast<unsigned long long>(released >> 20));
}

TEST_F(CudaTrim, MemoryIsBackWhenTheCallReturnsThoughWorkWasQueued) {
  const StreamInfo stream = permanent(lab_->new_stream());
  (void)allocator_->trim({});
  const std::int64_t base = free_now();
  for (std::uint32_t i = 0; i < 16; ++i) {
    const AddrRange range = allocate(100_MiB, stream);
    lab_->fill(stream.ref, range, i + 1, microseconds(2000));
    lab_->check(stream.ref, range, i + 1, microseconds(2000));
    allocator_->free(range.begin);
  }
  EXPECT_GT(reserved().n, 0u);
  const TrimReport report = allocator_->trim({});
  EXPECT_GT(report.released.n, 0u);
  EXPECT_EQ(reserved().n, 0u);
  EXPECT_LT(std::abs(difference(base)), kTolerance);
}

}  // namespace
}  // namespace gpumemx
