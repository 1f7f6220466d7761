// SPDX-License-Identifier: BSD-3-Clause
//
// Plain mode on a device: ordinary device allocations, nothing is mapped.
#include <vector>

#include "churn.hpp"

namespace gpumemx {
namespace {

class CudaPlain : public CudaTest {};

TEST_F(CudaPlain, ServesAndGivesBackWithoutVirtualMemory) {
  Options options;
  options.plain = true;
  start(options);
  ASSERT_TRUE(allocator_->plain_mode());
  const std::vector<StreamInfo> streams = {permanent(lab_->new_stream()),
                                           permanent(lab_->new_stream())};
  ChurnOptions work;
  work.most_live = 1_GiB;
  work.largest = 128_MiB;
  {  // The driver keeps a page of its own from the first small allocation on.
    Churn first(*lab_, *allocator_, streams, 49, work);
    first.run(100);
    first.free_all();
  }
  (void)allocator_->trim({});
  const auto before = driver_->memory();
  ASSERT_TRUE(before.ok());
  Churn churn(*lab_, *allocator_, streams, 50, work);
  for (int i = 0; i < 5; ++i) {
    churn.run(300);
    (void)allocator_->trim({});
    EXPECT_EQ(allocator_->validate().value_or(""), "");
  }
  churn.free_all();
  (void)allocator_->trim({});
  EXPECT_EQ(reserved().n, 0u);
  const auto after = driver_->memory();
  ASSERT_TRUE(after.ok());
  EXPECT_LE(before.value().free, after.value().free + 1_MiB);
  EXPECT_GT(paths().plain_segments, 40u);
  EXPECT_EQ(paths().created, 0u);
  EXPECT_EQ(paths().harvested_own + paths().harvested_other + paths().alias_switches, 0u);
  std::printf("  %llu device allocations\n",
              static_cast<unsigned long long>(paths().plain_segments));
}

}  // namespace
}  // namespace gpumemx
