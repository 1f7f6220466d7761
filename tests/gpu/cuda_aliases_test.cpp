// SPDX-License-Identifier: BSD-3-Clause
//
// Memory moves from hole to hole while kernels that use it are still queued, and is the same memory
// at every address. Thousands of blocks, checked word by word.
#include <thread>
#include <vector>

#include "churn.hpp"

namespace gpumemx {
namespace {

class CudaAliases : public CudaTest {
 protected:
  std::vector<StreamInfo> streams(int n) {
    std::vector<StreamInfo> made;
    for (int i = 0; i < n; ++i) made.push_back(permanent(lab_->new_stream()));
    return made;
  }
};

TEST_F(CudaAliases, ServeOneStreamWithoutAWrongWord) {
  Churn churn(*lab_, *allocator_, streams(1), 11);
  churn.run(6000);
  churn.free_all();
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  const PathCounts p = paths();
  EXPECT_GT(p.harvested_own, 500u);
  EXPECT_GT(p.alias_switches, 100u);
  EXPECT_GT(p.repointed, 100u);
  EXPECT_GT(p.recut, 0u);
  EXPECT_GT(p.aliases_dropped, 10u);
  EXPECT_EQ(p.rollbacks, 0u);
}

TEST_F(CudaAliases, ServeFourLaggingStreamsWithoutAWrongWord) {
  Churn churn(*lab_, *allocator_, streams(4), 12);
  churn.run(6000);
  churn.free_all();
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  const PathCounts p = paths();
  EXPECT_GT(p.harvested_own, 300u);
  EXPECT_GT(p.harvested_other, 100u);
  EXPECT_GT(p.alias_switches, 50u);
  EXPECT_GT(p.repointed, 50u);
  EXPECT_GT(p.recut, 10u);
  EXPECT_GT(p.late_retired, 50u);
  EXPECT_EQ(p.rollbacks, 0u);
}

// So small a cap that requests fail over to waiting, again and again.
TEST_F(CudaAliases, ServeFourStreamsNearACap) {
  Options options;
  options.cap = 1_GiB;
  start(options);
  ChurnOptions work;
  work.most_live = 800_MiB;
  work.largest = 96_MiB;
  Churn churn(*lab_, *allocator_, streams(4), 13, work);
  churn.run(4000);
  churn.free_all();
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  const PathCounts p = paths();
  EXPECT_GT(p.harvested_other, 100u);
  EXPECT_GT(p.recut, 20u);
  EXPECT_GT(p.waits, 0u);
}

TEST_F(CudaAliases, ServeFourThreadsWithoutAWrongWord) {
  std::vector<std::thread> threads;
  const std::vector<StreamInfo> all = streams(8);
  for (std::uint32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      ChurnOptions work;
      work.most_live = 1_GiB;
      work.largest = 128_MiB;
      Churn churn(*lab_, *allocator_, {all[2 * i], all[2 * i + 1]}, 20 + i, work);
      churn.run(2000);
      churn.free_all();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  const PathCounts p = paths();
  EXPECT_GT(p.harvested_own, 200u);
  EXPECT_GT(p.harvested_other, 100u);
  EXPECT_GT(p.alias_switches, 50u);
}

}  // namespace
}  // namespace gpumemx
