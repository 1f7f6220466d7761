// SPDX-License-Identifier: BSD-3-Clause
//
// A stream that is stuck until the host goes on, and a host that goes on only when its request for
// another stream is served. Whatever the request takes, it must not wait for the stuck stream.
#include <vector>

#include "cuda_lab.hpp"

namespace gpumemx {
namespace {

constexpr std::chrono::seconds kLimit{10};

class CudaNoDeadlock : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (lab_ == nullptr) return;
    stuck_ = permanent(lab_->new_stream());
    busy_ = permanent(lab_->new_stream());
    asking_ = permanent(lab_->new_stream());
  }
  void TearDown() override {
    if (lab_ == nullptr) return;
    EXPECT_FALSE(lab_->was_overdue()) << "something waited for the stuck stream";
    CudaTest::TearDown();
  }

  // Takes all that the device has, but for `rest`.
  void fill_device(Bytes rest) {
    const auto memory = driver_->memory();
    ASSERT_TRUE(memory.ok());
    const Bytes size = round_down(memory.value().free - rest, 2_MiB);
    ASSERT_EQ(allocate(size, permanent(lab_->new_stream())).size, size);
  }

  std::vector<AddrRange> blocks(StreamInfo stream, int count, Bytes size) {
    std::vector<AddrRange> all;
    for (int i = 0; i < count; ++i) all.push_back(allocate(size, stream));
    return all;
  }

  // Each block is written, read and freed, with the work still queued.
  void use_and_free(StreamInfo stream, const std::vector<AddrRange>& all, microseconds delay = {}) {
    for (const AddrRange& range : all) {
      lab_->fill(stream.ref, range, ++seed_, delay);
      lab_->check(stream.ref, range, seed_);
      allocator_->free(range.begin);
    }
  }

  // What waits on the stuck stream is let go when the request came back, and not before.
  void ask(Bytes size, int times = 1) {
    in_time(kLimit, [&] {
      std::vector<AddrRange> got;
      for (int i = 0; i < times; ++i) got.push_back(allocate(size, asking_));
      for (const AddrRange& range : got) lab_->fill(asking_.ref, range, ++seed_);
      for (const AddrRange& range : got) {
        lab_->check(asking_.ref, range, seed_ - static_cast<std::uint32_t>(&got.back() - &range));
      }
      lab_->let_go();
      for (const AddrRange& range : got) allocator_->free(range.begin);
    });
  }

  StreamInfo stuck_, busy_, asking_;
  std::uint32_t seed_ = 0;
};

TEST_F(CudaNoDeadlock, HarvestOnAFullDeviceWaitsForNobody) {
  fill_device(1600_MiB);
  const auto waiting = blocks(stuck_, 8, 64_MiB);
  const auto own = blocks(asking_, 128, 8_MiB);
  lab_->hold(stuck_.ref);
  use_and_free(stuck_, waiting);
  std::vector<AddrRange> every_second;
  for (std::size_t i = 0; i < own.size(); i += 2) every_second.push_back(own[i]);
  use_and_free(asking_, every_second, microseconds(500));
  const PathCounts before = paths();
  ask(64_MiB, 7);
  EXPECT_GE(paths().harvested_own - before.harvested_own, 50u);
  EXPECT_EQ(paths().waits, before.waits);
  for (std::size_t i = 1; i < own.size(); i += 2) allocator_->free(own[i].begin);
}

TEST_F(CudaNoDeadlock, ARequestWaitsForTheStreamThatComesToAnEnd) {
  fill_device(1600_MiB);
  const auto waiting = blocks(stuck_, 8, 64_MiB);
  const auto wanted = blocks(busy_, 64, 16_MiB);
  lab_->hold(stuck_.ref);
  use_and_free(busy_, wanted, microseconds(5000));
  use_and_free(stuck_, waiting);
  const PathCounts before = paths();
  ask(768_MiB);
  EXPECT_GE(paths().harvested_other - before.harvested_other, 10u);
  EXPECT_GE(paths().waits - before.waits, 1u);
}

// The same, but what is stuck was freed first.
TEST_F(CudaNoDeadlock, ARequestWaitsForTheStreamThatComesToAnEndNotForTheOldest) {
  fill_device(1600_MiB);
  const auto waiting = blocks(stuck_, 8, 64_MiB);
  const auto wanted = blocks(busy_, 64, 16_MiB);
  lab_->hold(stuck_.ref);
  use_and_free(stuck_, waiting);
  use_and_free(busy_, wanted, microseconds(5000));
  const PathCounts before = paths();
  ask(768_MiB);
  EXPECT_GE(paths().harvested_other - before.harvested_other, 10u);
  EXPECT_GE(paths().waits - before.waits, 1u);
}

// Too little was freed for an event: the request records them, and sees that one is reached.
TEST_F(CudaNoDeadlock, WorkThatIsLongDoneIsSeenThoughNoEventWasRecorded) {
  Options options;
  options.cap = 44_MiB;
  start(options);
  for (int round = 0; round < 50 && !HasFailure(); ++round) {
    const auto waiting = blocks(stuck_, 1, 16_MiB);
    const auto wanted = blocks(busy_, 1, 24_MiB);
    lab_->hold(stuck_.ref);
    use_and_free(stuck_, waiting);
    use_and_free(busy_, wanted);
    lab_->synchronize(busy_.ref);
    ask(24_MiB);
    lab_->synchronize(stuck_.ref);
    lab_->synchronize(asking_.ref);
  }
}

}  // namespace
}  // namespace gpumemx
