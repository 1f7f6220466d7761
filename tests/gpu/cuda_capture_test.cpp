// SPDX-License-Identifier: BSD-3-Clause
//
// One thread captures graphs in global mode, again and again, while others allocate, free and trim:
// a single call that a capture forbids, from any thread, would end it as invalid.
#include <atomic>
#include <thread>
#include <vector>

#include "churn.hpp"

namespace gpumemx {
namespace {

class CudaCapture : public CudaTest {};

TEST_F(CudaCapture, IsNotDisturbedByAStormOfRequests) {
  constexpr int kCaptures = 150;
  std::atomic<bool> stop{false};
  std::atomic<int> steps{0};
  std::vector<std::thread> storm;
  std::vector<StreamInfo> streams;
  for (int i = 0; i < 6; ++i) streams.push_back(permanent(lab_->new_stream()));
  for (std::uint32_t i = 0; i < 3; ++i) {
    storm.emplace_back([&, i] {
      ChurnOptions work;
      work.most_live = 512_MiB;
      work.largest = 64_MiB;
      work.longest = microseconds(3000);
      Churn churn(*lab_, *allocator_, {streams[2 * i], streams[2 * i + 1]}, 30 + i, work);
      for (int n = 1; !stop || n < 500; ++n) {
        churn.step();
        ++steps;
        if (n % 60 == 0) (void)allocator_->trim({std::nullopt, 256_MiB, /*wait=*/n % 240 == 0});
      }
      churn.free_all();
    });
  }

  const StreamInfo capturing = permanent(lab_->new_stream());
  const AddrRange fixed = allocate(4_MiB, capturing);
  int valid = 0, steps_in_captures = 0;
  for (int i = 0; i < kCaptures && !HasFailure(); ++i) {
    const bool told = i % 2 == 0;  // the allocator knows of torch's captures, not of anybody's
    const auto word = static_cast<std::uint32_t>(0xCA000000 + i);
    AddrRange range = fixed;
    PoolId pool{};
    lab_->synchronize(capturing.ref);
    if (told) {
      pool = allocator_->create_pool({});
      allocator_->begin_capture();
    }
    lab_->begin_capture(capturing.ref);
    const int before = steps;
    if (told) range = allocate(12_MiB, capturing, pool);
    const Bytes part{range.size.n / 4};
    for (std::uint64_t k = 0; k < 4; ++k) {
      lab_->set_words(capturing.ref, {range.begin + part * k, part}, word);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
    steps_in_captures += steps - before;
    const auto graph = lab_->end_capture(capturing.ref);
    if (told) allocator_->end_capture();
    EXPECT_TRUE(graph.has_value()) << "capture " << i << ": " << lab_->complaints();
    if (graph) {
      ++valid;
      lab_->launch(*graph, capturing.ref);
      lab_->check_words(capturing.ref, range, word);
      lab_->launch(*graph, capturing.ref);
      lab_->check_words(capturing.ref, range, word);
      lab_->synchronize(capturing.ref);
      lab_->destroy(*graph);
    }
    if (told) {
      allocator_->free(range.begin);
      allocator_->release_pool(pool);
    }
  }
  stop = true;
  for (std::thread& thread : storm) thread.join();
  allocator_->free(fixed.begin);
  EXPECT_EQ(valid, kCaptures);
  EXPECT_GT(steps_in_captures, kCaptures);
  EXPECT_GT(paths().misses, 300u);
  EXPECT_GE(paths().capture_blocks, static_cast<std::uint64_t>(kCaptures / 2));
  std::printf("  %d captures valid, %d requests while they were under way\n", valid,
              steps_in_captures);
}

// Events are recorded on the streams of all threads. None may get into a capture that another thread
// begins on its stream: it would be somebody's graph's, and CUDA does not synchronize graphs, so two
// threads at one crash.
TEST_F(CudaCapture, BeginsWhileAnotherThreadFreesOnTheStream) {
  constexpr int kCaptures = 3000;
  const StreamInfo stream = permanent(lab_->new_stream());
  const AddrRange range = allocate(2_MiB, stream);
  const std::uint64_t before = paths().fences;
  std::atomic<bool> stop{false};
  std::atomic<int> freed{0};
  std::thread other([&] {
    while (!stop) {
      // Of a size whose frees record an event each.
      const AddrRange block = allocate(64_MiB, stream);
      allocator_->free(block.begin);
      ++freed;
    }
  });
  int valid = 0;
  for (int i = 0; i < kCaptures; ++i) {
    allocator_->begin_capture();
    lab_->begin_capture(stream.ref);
    lab_->set_words(stream.ref, range, 1);
    const auto graph = lab_->end_capture(stream.ref);
    allocator_->end_capture();
    if (!graph) continue;
    ++valid;
    lab_->destroy(*graph);
  }
  stop = true;
  other.join();
  EXPECT_EQ(valid, kCaptures);
  EXPECT_GT(freed, 100);
  EXPECT_GT(paths().fences - before, 100u);
  std::printf("  %d captures valid, %d blocks freed meanwhile, %llu events recorded\n", valid,
              freed.load(), static_cast<unsigned long long>(paths().fences - before));
  lab_->synchronize(stream.ref);
  allocator_->free(range.begin);
}

}  // namespace
}  // namespace gpumemx
