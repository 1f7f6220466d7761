// SPDX-License-Identifier: BSD-3-Clause
//
// When the allocator knows that work is complete: events, pending blocks, streams that die.
#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

class CompletionTest : public AllocatorTest {
 protected:
  CompletionTest() : AllocatorTest(device_of(4_GiB)) { gpu_.set_manual(true); }
  ~CompletionTest() override { gpu_.complete_all(); }
  const StreamInfo a_ = permanent(main_);
  const StreamInfo b_ = new_stream();
};

TEST_F(CompletionTest, RecordsOneEventForManySmallFrees) {
  const auto blocks = alloc_many(64, 1_KiB);
  gpu_.reset_meter();
  for (std::size_t i = 0; i < 63; ++i) allocator_->free(blocks[i]);
  EXPECT_EQ(calls(DriverCall::kRecord), 0u);
  allocator_->free(blocks[63]);
  EXPECT_EQ(calls(DriverCall::kRecord), 1u);  // the 64th
  EXPECT_EQ(paths().fences, 1u);
}

TEST_F(CompletionTest, RecordsAnEventWhenMuchWasFreed) {
  const DeviceAddr a = alloc(30_MiB), b = alloc(2_MiB);
  gpu_.reset_meter();
  free(a);
  EXPECT_EQ(calls(DriverCall::kRecord), 0u);
  free(b);
  EXPECT_EQ(calls(DriverCall::kRecord), 1u);
}

// Nobody waits for a free whose memory is in use again: only what is still free counts.
TEST_F(CompletionTest, MemoryThatIsInUseAgainNeedsNoEvent) {
  const DeviceAddr other = alloc(20_MiB);
  free(alloc(20_MiB));
  gpu_.reset_meter();
  for (int i = 0; i < 20; ++i) free(alloc(20_MiB));
  EXPECT_EQ(calls(DriverCall::kRecord), 0u);
  free(other);
  EXPECT_EQ(calls(DriverCall::kRecord), 1u);
}

// What was freed before the last event is not what the next one is for.
TEST_F(CompletionTest, MemoryFreedInAnEarlierEpochDoesNotCount) {
  const DeviceAddr a = alloc(40_MiB), b = alloc(20_MiB), c = alloc(12_MiB);
  gpu_.reset_meter();
  free(a);
  EXPECT_EQ(calls(DriverCall::kRecord), 1u);
  free(b);
  alloc(40_MiB);
  EXPECT_EQ(calls(DriverCall::kRecord), 1u);
  free(c);
  EXPECT_EQ(calls(DriverCall::kRecord), 2u);
}

TEST_F(CompletionTest, AMissRecordsAnEventOnlyWhereMuchOrManyWereFreed) {
  alloc(1_GiB);
  const auto blocks = alloc_many(16, 32_KiB);  // together less than a 1,024th of the peak
  for (std::size_t i = 0; i < 15; ++i) allocator_->free(blocks[i]);
  alloc(8_MiB, b_);
  EXPECT_EQ(paths().fences, 0u);
  allocator_->free(blocks[15]);
  alloc(8_MiB, b_);
  EXPECT_EQ(paths().fences, 1u);
  free(alloc(2_MiB));
  alloc(8_MiB, b_);
  EXPECT_EQ(paths().fences, 2u);
}

// Page blocks and big ones take the same memory by turns, so that every request is a miss, which needs no
// driver call and does not grow.
TEST_F(CompletionTest, WhileWorkIsUnderWayMostMissesDoNotAskForIt) {
  const Bytes pages = 64_MiB, big = 64_MiB - 512_KiB;
  gpu_.set_manual(false);
  for (int i = 0; i < 3; ++i) {
    free(alloc(pages));
    free(alloc(big));
  }
  gpu_.set_manual(true);
  const std::uint64_t created = paths().created, misses = paths().misses;
  free(alloc(pages));  // there is an event that is not reached from here on
  free(alloc(big));
  gpu_.reset_meter();
  for (int i = 0; i < 4; ++i) {
    free(alloc(pages));
    free(alloc(big));
  }
  EXPECT_EQ(paths().created, created);
  EXPECT_EQ(paths().misses, misses + 10);
  EXPECT_EQ(calls(DriverCall::kQuery), 2u);  // every fourth of the eight
}

TEST_F(CompletionTest, AMissThatWouldGrowAsksFirst) {
  const DeviceAddr x = alloc(64_MiB);
  gpu_.launch(main_, {writes({x, 64_MiB}, 1)});
  free(x);
  free(alloc(32_MiB, b_));  // asks in vain
  gpu_.complete_all();
  const std::uint64_t created = paths().created;
  gpu_.reset_meter();
  alloc(64_MiB, b_);
  EXPECT_GT(calls(DriverCall::kQuery), 0u);
  EXPECT_EQ(paths().created, created);
}

TEST_F(CompletionTest, KeepsNoMoreEventsInFlightThanAllowed) {
  Options options;
  options.max_fences = 3;
  start(options);
  for (int i = 0; i < 10; ++i) free(alloc(40_MiB));
  EXPECT_EQ(paths().fences, 3u);
  EXPECT_EQ(gpu_.live_events(), 3u);
  gpu_.complete_all();
  alloc(50_MiB);  // a miss asks them all, and they are recycled
  EXPECT_LE(gpu_.live_events(), 1u);
}

TEST_F(CompletionTest, ABlockThatAnotherStreamUsesIsPendingUntilThatStreamIsThere) {
  const DeviceAddr block = alloc(1_MiB);
  EXPECT_TRUE(allocator_->record_stream(block, b_));
  EXPECT_TRUE(allocator_->record_stream(block, b_));  // twice is once
  gpu_.launch(b_.ref, {writes({block, 1_MiB}, 1)});
  free(block);
  Stats s = stats();
  EXPECT_EQ(s.allocated_bytes.all().current, 0);
  EXPECT_EQ(s.active_bytes.all().current, n(1_MiB));
  EXPECT_EQ(s.active.all().current, 1);
  EXPECT_EQ(s.requested_bytes.all().current, n(1_MiB));
  EXPECT_EQ(allocator_->find_block(block), std::nullopt);
  EXPECT_EQ(allocator_->blocks()[0].state, BlockState::kPending);

  const DeviceAddr second = alloc(1_MiB);
  EXPECT_NE(second, block);
  gpu_.complete(b_.ref);
  EXPECT_EQ(alloc(1_MiB), block);  // retired on the way
  s = stats();
  EXPECT_EQ(s.paths.late_retired, 1u);
  EXPECT_EQ(s.active_bytes.all().current, n(2_MiB));
}

TEST_F(CompletionTest, ABlockIsPendingUntilTheLastOfItsStreamsIsThere) {
  const StreamInfo c = new_stream();
  const DeviceAddr block = alloc(1_MiB);
  allocator_->record_stream(block, b_);
  allocator_->record_stream(block, c);
  gpu_.launch(b_.ref, {writes({block, 1_MiB}, 1)});
  free(block);
  gpu_.complete(b_.ref);
  EXPECT_NE(alloc(512_B), block);
  EXPECT_EQ(paths().late_retired, 0u);
  gpu_.complete(c.ref);
  alloc(512_B);
  EXPECT_EQ(paths().late_retired, 1u);
}

// Copies and kernels of a device use memory of another one's; torch's record_stream() names its stream.
TEST_F(CompletionTest, ABlockIsPendingForWorkOfAnotherDevicesStreamToo) {
  const StreamInfo theirs = permanent(gpu_.new_stream_of(1));
  ASSERT_EQ(theirs.ref.device, 1);
  const DeviceAddr block = alloc(1_MiB);
  EXPECT_TRUE(allocator_->record_stream(block, theirs));
  gpu_.launch(theirs.ref, {writes({block, 1_MiB}, 1)});
  free(block);
  EXPECT_NE(alloc(1_MiB), block);
  alloc(20_MiB);
  EXPECT_EQ(paths().late_retired, 0u);
  gpu_.complete(theirs.ref);
  alloc(40_MiB);
  EXPECT_EQ(paths().late_retired, 1u);
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(CompletionTest, ItsOwnStreamDoesNotMakeABlockPending) {
  const DeviceAddr block = alloc(1_MiB);
  EXPECT_TRUE(allocator_->record_stream(block, a_));
  free(block);
  EXPECT_EQ(stats().active_bytes.all().current, 0);
  EXPECT_EQ(alloc(1_MiB), block);
}

TEST_F(CompletionTest, RecordStreamOfAnythingButALiveBlockSaysSoAndDoesNothing) {
  const DeviceAddr block = alloc(1_MiB);
  EXPECT_FALSE(allocator_->record_stream({12345}, b_));
  EXPECT_FALSE(allocator_->record_stream(block + 512_B, b_));
  allocator_->record_stream(block, b_);
  free(block);
  EXPECT_FALSE(allocator_->record_stream(block, b_));  // pending
}

TEST_F(CompletionTest, TheNextUserOfABlockDoesNotInheritItsStreams) {
  const DeviceAddr block = alloc(1_MiB);
  allocator_->record_stream(block, b_);
  free(block);
  gpu_.complete_all();
  ASSERT_EQ(alloc(1_MiB), block);
  free(block);
  EXPECT_EQ(stats().active_bytes.all().current, 0);
}

TEST_F(CompletionTest, FreeRequestedAndCompletedAreApartForAPendingBlock) {
  allocator_->record_history(20);
  const DeviceAddr block = alloc(1_MiB);
  allocator_->record_stream(block, b_);
  free(block);
  const auto last = [&] { return allocator_->history().back().kind; };
  EXPECT_EQ(last(), EventKind::kFreeRequested);
  gpu_.complete_all();
  allocator_->trim({.pool = std::nullopt, .target = Bytes{~0ull}, .wait = false});
  EXPECT_EQ(last(), EventKind::kFreeCompleted);
}

TEST_F(CompletionTest, OnATemporaryStreamAnEventIsRecordedAtEachFree) {
  const StreamInfo t = temporary(gpu_.new_stream());
  const DeviceAddr x = alloc(1_KiB, t), y = alloc(1_KiB, t);
  gpu_.reset_meter();
  free(x);
  free(y);
  EXPECT_EQ(calls(DriverCall::kRecord), 2u);
}

TEST_F(CompletionTest, NothingIsAskedOfAStreamThatWasDestroyed) {
  const StreamInfo t = temporary(gpu_.new_stream());
  const DeviceAddr x = alloc(40_MiB, t);
  const DeviceAddr y = alloc(40_MiB, t);
  allocator_->record_stream(y, b_);
  gpu_.launch(t.ref, {writes({x, 40_MiB}, 1)});
  free(x);
  free(y);
  gpu_.destroy_stream(t.ref);
  // Misses, trims, pools and captures on other streams: each closes epochs.
  alloc(10_MiB);
  allocator_->begin_capture();
  allocator_->end_capture();
  const PoolId pool = allocator_->create_pool({});
  allocator_->release_pool(pool);
  gpu_.complete_all();
  allocator_->trim({});
  gpu_.complete_all();
  free(alloc(100_MiB));
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(CompletionTest, MemoryOfADeadStreamGoesToOthersOnceItIsComplete) {
  const StreamInfo t = temporary(gpu_.new_stream());
  const DeviceAddr x = alloc(64_MiB, t);
  gpu_.launch(t.ref, {writes({x, 64_MiB}, 1)});
  free(x);
  gpu_.destroy_stream(t.ref);
  const auto created = [&] { return paths().created; };
  const std::uint64_t before = created();
  const DeviceAddr while_running = alloc(64_MiB);
  EXPECT_GT(created(), before);  // its work still runs
  free(while_running);
  gpu_.complete_all();
  const std::uint64_t then = created();
  alloc(128_MiB);
  EXPECT_EQ(created(), then);
  EXPECT_EQ(reserved(), 128_MiB);
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(CompletionTest, MemoryThatWasPendingWhenItsStreamDiedIsNotLost) {
  const StreamInfo t = temporary(gpu_.new_stream());
  alloc(512_B);
  const DeviceAddr x = alloc(64_MiB, t);
  allocator_->record_stream(x, b_);
  gpu_.launch(b_.ref, {writes({x, 64_MiB}, 1)});
  free(x);
  gpu_.destroy_stream(t.ref);
  gpu_.complete_all();
  alloc(512_B);  // retires it, when its stream is long gone
  EXPECT_EQ(paths().late_retired, 1u);
  gpu_.complete_all();
  const TrimReport report = allocator_->trim({});
  EXPECT_EQ(report.released, 64_MiB);
  EXPECT_EQ(report.pending, 0_B);
}

TEST_F(CompletionTest, OnACapturingStreamTheEventIsRecordedWhenTheCaptureEnds) {
  const StreamInfo t = temporary(gpu_.new_stream());
  const DeviceAddr x = alloc(64_MiB, t);
  gpu_.begin_capture(t.ref, CaptureMode::kGlobal);
  allocator_->begin_capture();
  free(x);
  EXPECT_EQ(paths().fences, 0u);
  ASSERT_TRUE(gpu_.end_capture(t.ref).ok());
  allocator_->end_capture();
  EXPECT_EQ(paths().fences, 1u);
  gpu_.destroy_stream(t.ref);
  gpu_.complete_all();
  const std::uint64_t created = paths().created;
  alloc(64_MiB);
  EXPECT_EQ(paths().created, created);
}

TEST_F(CompletionTest, AnEventThatCouldNotBeRecordedIsMadeUpForByALaterOne) {
  const DeviceAddr x = alloc(64_MiB);
  gpu_.fail_nth(DriverCall::kRecord, 1);
  free(x);
  EXPECT_EQ(paths().fences, 0u);
  gpu_.complete_all();
  alloc(64_MiB, b_);  // a miss: it records one, too late for itself
  gpu_.complete_all();
  const std::uint64_t created = paths().created;
  alloc(64_MiB, b_);
  EXPECT_EQ(paths().created, created);
}

// A capture that begins on another thread's stream within a call that records there, and is over before
// the event is asked for.
TEST_F(CompletionTest, AnEventThatACaptureHasIsMadeUpForByALaterOne) {
  const DeviceAddr x = alloc(64_MiB);
  gpu_.lose_next_event();
  free(x);
  EXPECT_EQ(paths().fences, 1u);
  gpu_.complete_all();
  alloc(64_MiB, b_);  // a miss: the event says nothing, and is given up
  EXPECT_EQ(gpu_.live_events(), 0u);
  alloc(64_MiB, b_);  // records another
  EXPECT_EQ(gpu_.live_events(), 1u);
  gpu_.complete_all();
  const std::uint64_t created = paths().created;
  alloc(64_MiB, b_);
  EXPECT_EQ(paths().created, created);
}

// Nothing is recorded, and the capture stays valid.
TEST_F(CompletionTest, ACaptureThatBeginsWithinARecordOfAnotherThreadStaysValid) {
  const DeviceAddr x = alloc(1_MiB);
  free(x);  // too little for an event at once
  bool began = false;
  gpu_.set_call_hook([&](DriverCall call) {
    if (call != DriverCall::kRecord || began) return;
    began = true;
    gpu_.begin_capture(main_, CaptureMode::kGlobal);
  });
  alloc(64_MiB, b_);  // a miss: an event is wanted on every stream
  gpu_.set_call_hook(nullptr);
  ASSERT_TRUE(began);
  EXPECT_EQ(paths().fences, 0u);
  alloc(64_MiB, b_);
  EXPECT_TRUE(gpu_.end_capture(main_).ok());
  gpu_.complete_all();
}

TEST_F(CompletionTest, ARequestWaitsOnlyWhenNothingElseIsLeft) {
  free(alloc(3_GiB));
  gpu_.reset_meter();
  alloc(512_MiB, b_);  // 1 GiB is still free on the device
  EXPECT_EQ(gpu_.waits(), 0u);
  alloc(3_GiB, b_);
  EXPECT_EQ(gpu_.waits(), 1u);
  EXPECT_EQ(paths().waits, 1u);
}

// The stream that was freed on first may be stuck until this very request is served.
TEST_F(CompletionTest, ARequestWaitsForWhicheverStreamComesFirst) {
  gpu_.set_manual(b_.ref, false);  // the others stay manual: stuck
  gpu_.set_lag_us(b_.ref, 1000);
  const DeviceAddr first = alloc(1_GiB);
  const DeviceAddr second = alloc(2_GiB, b_);
  free(first);
  free(second);
  alloc(2_GiB, new_stream());
  EXPECT_EQ(gpu_.waits(), 1u);
  EXPECT_GT(gpu_.queued(main_), 0u);
}

TEST_F(CompletionTest, AWaitThatFailsEndsInAVerdictAndNotInALoop) {
  free(alloc(3_GiB));
  gpu_.fail_always(DriverCall::kWait);
  const AllocResult got = try_alloc(3_GiB, b_);
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.failure->cause, OomCause::kPendingOnStreams);
  EXPECT_EQ(got.failure->idle_pending, 3_GiB);
  gpu_.clear_failures();
  alloc(3_GiB, b_);
}

// One thread waits for the first event of a stream. Meanwhile another finds that event reached, and
// needs the memory behind the second one: it has to wait for that, not to fail.
TEST_F(CompletionTest, AReachedEventThatSomebodyStillWaitsForHidesNoLaterOne) {
  const DeviceAddr x = alloc(2_GiB), y = alloc(2_GiB);
  free(x);
  free(y);
  bool nested = false;
  AllocResult inner{};
  gpu_.set_call_hook([&](DriverCall call) {
    if (call != DriverCall::kWait || nested) return;
    nested = true;
    gpu_.complete(main_, 1);  // the event that is about to be waited for
    inner = try_alloc(4_GiB, b_);
  });
  const AllocResult outer = try_alloc(2_GiB, b_);
  gpu_.set_call_hook(nullptr);
  EXPECT_TRUE(nested);
  EXPECT_TRUE(inner.ok()) << inner.failure->text();
  EXPECT_FALSE(outer.ok());  // all of it went to the other
}

TEST_F(CompletionTest, NoCaptureBeginsWhileAnEventIsRecorded) {
  std::future<void> capture;
  gpu_.set_call_hook([&](DriverCall call) {
    if (call != DriverCall::kRecord || capture.valid()) return;
    capture = std::async(std::launch::async, [&] { allocator_->begin_capture(); });
    EXPECT_EQ(capture.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  });
  free(alloc(512_MiB));
  ASSERT_TRUE(capture.valid());
  capture.get();
  gpu_.set_call_hook(nullptr);
  allocator_->end_capture();
}

}  // namespace
}  // namespace gpumemx
