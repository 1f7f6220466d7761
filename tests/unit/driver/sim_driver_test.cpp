// SPDX-License-Identifier: BSD-3-Clause
//
// The simulated device beyond the contract: that it catches each kind of misuse and names both
// operations (every one is planted here), its clock, failures on demand, and what it charges.
// tests/contract/ holds it to the rules that all drivers share.
#include "driver/sim/sim_driver.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver/sim/sim_machine.hpp"
#include "support/error_of.hpp"
#include "support/sim_tools.hpp"

namespace gpumemx {
namespace {

AddrRange part(AddrRange range, Bytes offset, Bytes size) { return {range.begin + offset, size}; }

std::string name(const char* call, std::uint64_t serial) {
  return std::string(call) + " #" + std::to_string(serial);
}

// Planted misuse: the proof that the checker works.

class SimHazards : public ::testing::Test {
 protected:
  SimDriver gpu_;
  const StreamRef main_ = gpu_.default_stream();
};

TEST_F(SimHazards, AProgramThatKeepsTheRulesHasNone) {
  const SimPage page = make_page(gpu_);
  gpu_.launch(main_, {writes(page.range, 5)});
  const AddrRange alias = make_alias(gpu_, page);
  gpu_.launch(main_, {reads(alias, 5)});
  EXPECT_TRUE(gpu_.unmap(alias).ok());
  EXPECT_TRUE(gpu_.unreserve(alias).ok());
  drop_page(gpu_, page);
  EXPECT_EQ(joined_hazards(gpu_), "");
  EXPECT_TRUE(gpu_.empty());
}

TEST_F(SimHazards, AReadOfMemoryThatWasNeverWrittenIsOne) {
  const SimPage page = make_page(gpu_);
  const auto op = gpu_.launch(main_, {reads(page.range, 5)});
  EXPECT_TRUE(is_the_hazard(gpu_, {name("read", op), "never written", "map #3"}));
}

TEST_F(SimHazards, NewMemoryHoldsNothingOfWhatStoodThereBefore) {
  const SimPage page = make_page(gpu_);
  gpu_.launch(main_, {writes(page.range, 5)});
  drop_page(gpu_, page);
  const SimPage again = make_page(gpu_);
  EXPECT_EQ(again.range, page.range);
  gpu_.launch(main_, {reads(again.range, 5)});
  EXPECT_TRUE(is_the_hazard(gpu_, {"never written"}));
}

TEST_F(SimHazards, AReadThatFindsAnotherTagNamesWhoWroteIt) {
  const SimPage page = make_page(gpu_);
  const StreamRef other = gpu_.new_stream();
  gpu_.launch(main_, {writes(page.range, 5)});
  const auto thief = gpu_.launch(other, {writes(part(page.range, 4_KiB, 512_B), 6)});
  const auto victim = gpu_.launch(main_, {reads(page.range, 5)});
  EXPECT_TRUE(is_the_hazard(gpu_, {name("read", victim) + " on stream 1", "tag 5", "finds tag 6",
                                   name("write", thief) + " on stream 2", "+512) tag 6"}));
}

TEST_F(SimHazards, OneGranuleMoreThanWasWrittenIsSeen) {
  const SimPage page = make_page(gpu_);
  gpu_.launch(main_, {writes(part(page.range, 0_B, 1_MiB), 5)});
  gpu_.launch(main_, {reads(part(page.range, 0_B, 1_MiB), 5)});
  EXPECT_EQ(gpu_.hazard_count(), 0u);
  gpu_.launch(main_, {reads(part(page.range, 0_B, 1_MiB + 512_B), 5)});
  EXPECT_EQ(gpu_.hazard_count(), 1u);
}

TEST_F(SimHazards, MemoryHandedOverBeforeItsLastUseRanIsSeenByTheLateReader) {
  const SimPage page = make_page(gpu_);
  const StreamRef other = gpu_.new_stream();
  gpu_.set_manual(true);
  gpu_.launch(main_, {writes(page.range, 5)});
  const auto late = gpu_.launch(main_, {reads(page.range, 5)});
  const auto early = gpu_.launch(other, {writes(page.range, 6)});
  gpu_.complete(main_, 1);
  gpu_.complete(other);
  gpu_.complete(main_);
  EXPECT_TRUE(is_the_hazard(gpu_, {name("read", late), name("write", early)}));
}

TEST_F(SimHazards, UseOfARangeThatIsNotMappedNamesTheUnmap) {
  const SimPage page = make_page(gpu_);      // serials 1 to 4
  EXPECT_TRUE(gpu_.unmap(page.range).ok());  // 5
  const auto op = gpu_.launch(main_, {writes(page.range, 5)});
  EXPECT_TRUE(is_the_hazard(gpu_, {name("write", op), "nothing is mapped at", "unmap #5"}));
}

TEST_F(SimHazards, UseOfARangeWithoutAccessNamesTheMap) {
  const AddrRange range = gpu_.reserve(2_MiB, 2_MiB).value();
  const HandleId handle = gpu_.create(2_MiB).value();
  ASSERT_TRUE(gpu_.map(range, handle).ok());  // 3
  const auto op = gpu_.launch(main_, {writes(range, 5)});
  EXPECT_TRUE(is_the_hazard(gpu_, {name("write", op), "no access was set", "map #3"}));
}

TEST_F(SimHazards, UseThatRunsPastTheEndOfAMappingIsSeen) {
  const SimPage page = make_page(gpu_);
  gpu_.launch(main_, {writes(part(page.range, 1_MiB, 2_MiB), 5)});
  EXPECT_TRUE(is_the_hazard(gpu_, {"nothing is mapped at"}));
}

TEST_F(SimHazards, UnmapOfMemoryInUseNamesTheWork) {
  const SimPage page = make_page(gpu_);
  gpu_.set_manual(true);
  const auto op = gpu_.launch(main_, {writes(part(page.range, 1_MiB, 512_B), 5)});
  EXPECT_TRUE(gpu_.unmap(page.range).ok());  // the driver does not notice either
  EXPECT_TRUE(is_the_hazard(gpu_, {"unmap #", "still used by " + name("write", op)}));
  gpu_.clear_hazards();
  gpu_.complete_all();
  EXPECT_TRUE(is_the_hazard(gpu_, {name("write", op), "nothing is mapped at", "unmap #"}));
}

TEST_F(SimHazards, UnmapOfAnAliasThatNoQueuedWorkNamesIsNone) {
  const SimPage page = make_page(gpu_);
  const AddrRange alias = make_alias(gpu_, page);
  gpu_.set_manual(true);
  gpu_.launch(main_, {writes(page.range, 5)});
  EXPECT_TRUE(gpu_.unmap(alias).ok());
  gpu_.complete_all();
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(SimHazards, UnmapOfMemoryInUseIsSeenAlsoWhenACaptureTouchedItSince) {
  const SimPage page = make_page(gpu_);
  gpu_.set_manual(true);
  const auto op = gpu_.launch(main_, {writes(page.range, 5)});
  gpu_.begin_capture(main_, CaptureMode::kGlobal);
  gpu_.launch(main_, {writes(page.range, 6)});
  EXPECT_TRUE(gpu_.end_capture(main_).ok());
  EXPECT_TRUE(gpu_.unmap(page.range).ok());
  EXPECT_TRUE(is_the_hazard(gpu_, {"unmap #", name("write", op)}));
}

TEST_F(SimHazards, MapOverAMappedRangeNamesTheFirstMap) {
  const SimPage page = make_page(gpu_);
  const HandleId other = gpu_.create(2_MiB).value();
  EXPECT_EQ(error_of(gpu_.map(page.range, other)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"map #6", "already mapped by map #3"}));
}

TEST_F(SimHazards, MapOutsideAReservedRangeNamesTheUnreserve) {
  const AddrRange range = gpu_.reserve(2_MiB, 2_MiB).value();
  const HandleId handle = gpu_.create(2_MiB).value();
  ASSERT_TRUE(gpu_.unreserve(range).ok());  // 3
  EXPECT_EQ(error_of(gpu_.map(range, handle)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"map #4", "not in one reserved range", "unreserve #3"}));
}

TEST_F(SimHazards, MapAcrossTwoReservedRangesIsOne) {
  const AddrRange first = gpu_.reserve(2_MiB, 2_MiB).value();
  const AddrRange second = gpu_.reserve(2_MiB, 2_MiB).value();
  ASSERT_EQ(first.end(), second.begin);
  const HandleId handle = gpu_.create(4_MiB).value();
  EXPECT_FALSE(gpu_.map({first.begin, 4_MiB}, handle).ok());
  EXPECT_TRUE(is_the_hazard(gpu_, {"not in one reserved range"}));
}

TEST_F(SimHazards, ReleaseOfAMappedHandleNamesTheMap) {
  const SimPage page = make_page(gpu_);
  EXPECT_EQ(error_of(gpu_.release(page.handle)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"release #5", "still mapped by map #3"}));
}

TEST_F(SimHazards, ASecondReleaseNamesTheFirst) {
  const HandleId handle = gpu_.create(2_MiB).value();
  ASSERT_TRUE(gpu_.release(handle).ok());  // 2
  EXPECT_EQ(error_of(gpu_.release(handle)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"release #3", "no such handle", "release #2"}));
}

TEST_F(SimHazards, ASecondUnmapNamesTheFirst) {
  const SimPage page = make_page(gpu_);
  ASSERT_TRUE(gpu_.unmap(page.range).ok());  // 5
  EXPECT_EQ(error_of(gpu_.unmap(page.range)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"unmap #6", "unmap #5"}));
}

TEST_F(SimHazards, UnmapOfAPartIsOne) {
  const SimPage page = make_page(gpu_, 4_MiB);
  EXPECT_FALSE(gpu_.unmap(part(page.range, 0_B, 2_MiB)).ok());
  EXPECT_TRUE(is_the_hazard(gpu_, {"not the range of one map()"}));
}

TEST_F(SimHazards, MapOfAnUnknownHandleIsOne) {
  const AddrRange range = gpu_.reserve(2_MiB, 2_MiB).value();
  EXPECT_FALSE(gpu_.map(range, HandleId{99}).ok());
  EXPECT_TRUE(is_the_hazard(gpu_, {"map #2", "no such handle"}));
}

TEST_F(SimHazards, UnreserveOfAMappedRangeNamesTheMap) {
  const SimPage page = make_page(gpu_);
  EXPECT_FALSE(gpu_.unreserve(page.range).ok());
  EXPECT_TRUE(is_the_hazard(gpu_, {"unreserve #5", "still mapped by map #3"}));
}

TEST_F(SimHazards, ASecondFreeNamesTheFirst) {
  const DeviceAddr address = gpu_.allocate(1_KiB).value();
  ASSERT_TRUE(gpu_.free(address).ok());  // 2
  EXPECT_EQ(error_of(gpu_.free(address)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"free #3", "free #2"}));
}

TEST_F(SimHazards, APlainFreeWaitsForQueuedWorkAndIsNone) {
  const DeviceAddr address = gpu_.allocate(1_KiB).value();
  gpu_.set_manual(true);
  gpu_.launch(main_, {writes({address, 1_KiB}, 5)});
  EXPECT_TRUE(gpu_.free(address).ok());
  EXPECT_EQ(gpu_.queued(main_), 0u);
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(SimHazards, AnythingOnADestroyedStreamNamesItsEnd) {
  const SimPage page = make_page(gpu_);
  const StreamRef stream = gpu_.new_stream();
  gpu_.destroy_stream(stream);  // 5
  const auto op = gpu_.launch(stream, {writes(page.range, 5)});
  EXPECT_TRUE(is_the_hazard(gpu_, {name("write", op), "destroyed by destroy_stream #5"}));
  gpu_.clear_hazards();
  EXPECT_EQ(error_of(gpu_.record(stream)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"record #7", "destroyed by destroy_stream #5"}));
}

TEST_F(SimHazards, ADestroyedStreamIsKnownByItsIdWhenItsNativeValueLivesAgain) {
  const StreamRef stream = gpu_.new_stream();
  gpu_.destroy_stream(stream);
  const StreamRef heir = gpu_.new_stream();
  EXPECT_EQ(heir.native, stream.native);
  EXPECT_NE(heir.id, stream.id);
  EXPECT_TRUE(gpu_.record(heir).ok());
  EXPECT_EQ(gpu_.hazard_count(), 0u);
  EXPECT_FALSE(gpu_.record(stream).ok());
  EXPECT_TRUE(is_the_hazard(gpu_, {"destroyed by destroy_stream"}));
}

TEST_F(SimHazards, WorkOfADestroyedStreamStillFinishes) {
  const SimPage page = make_page(gpu_);
  const StreamRef stream = gpu_.new_stream();
  gpu_.set_lag_us(100);
  gpu_.launch(stream, {writes(page.range, 5)});
  const EventId event = gpu_.record(stream).value();
  gpu_.destroy_stream(stream);
  EXPECT_FALSE(gpu_.query(event).value());
  gpu_.advance_to(100);
  EXPECT_TRUE(gpu_.query(event).value());
  gpu_.launch(main_, {reads(page.range, 5)});
  gpu_.advance_to(200);
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(SimHazards, ASecondRecycleNamesTheFirst) {
  const EventId event = gpu_.record(main_).value();
  gpu_.recycle(event);  // 2
  gpu_.recycle(event);
  EXPECT_TRUE(is_the_hazard(gpu_, {"recycle #3", "recycled by recycle #2"}));
}

TEST_F(SimHazards, QueryAndWaitOfARecycledEventNameItsEndAlsoWhenItsPlaceIsTaken) {
  const EventId event = gpu_.record(main_).value();
  gpu_.recycle(event);
  const EventId other = gpu_.record(main_).value();
  EXPECT_NE(event, other);
  EXPECT_EQ(error_of(gpu_.query(event)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu_, {"query #4", "recycle #2"}));
  gpu_.clear_hazards();
  EXPECT_FALSE(gpu_.wait(event).ok());
  EXPECT_TRUE(is_the_hazard(gpu_, {"wait #5", "recycle #2"}));
}

TEST_F(SimHazards, AnUnknownEventIsOne) {
  gpu_.recycle(EventId{12345});
  EXPECT_TRUE(is_the_hazard(gpu_, {"recycle #1", "not live"}));
}

TEST_F(SimHazards, AForbiddenCallFromAnyThreadEndsAGlobalCapture) {
  const EventId event = gpu_.record(main_).value();
  const DeviceAddr plain = gpu_.allocate(1_KiB).value();
  const StreamRef stream = gpu_.new_stream();
  const auto calls = std::vector<std::pair<const char*, std::function<bool()>>>{
      {"query #", [&] { return gpu_.query(event).ok(); }},
      {"wait #", [&] { return gpu_.wait(event).ok(); }},
      {"allocate #", [&] { return gpu_.allocate(1_KiB).ok(); }},
      {"free #", [&] { return gpu_.free(plain).ok(); }},
  };
  for (const auto& [text, call] : calls) {
    SCOPED_TRACE(text);
    gpu_.clear_hazards();
    gpu_.begin_capture(stream, CaptureMode::kGlobal);
    std::thread([&, f = call] { EXPECT_FALSE(f()); }).join();
    EXPECT_TRUE(is_the_hazard(gpu_, {text, "ends the capture of stream 2", "begin_capture #"}));
    EXPECT_EQ(error_of(gpu_.end_capture(stream)), Errc::kInvalidArgument);
  }
}

TEST_F(SimHazards, AThreadLocalCaptureForbidsOnlyItsOwnThread) {
  const EventId event = gpu_.record(main_).value();
  const StreamRef stream = gpu_.new_stream();
  gpu_.begin_capture(stream, CaptureMode::kThreadLocal);
  std::thread([&] { EXPECT_TRUE(gpu_.query(event).ok()); }).join();
  {
    RelaxedCapture relaxed(gpu_);
    EXPECT_TRUE(gpu_.query(event).ok());
  }
  EXPECT_EQ(gpu_.hazard_count(), 0u);
  EXPECT_FALSE(gpu_.query(event).ok());
  EXPECT_EQ(gpu_.hazard_count(), 1u);
  EXPECT_FALSE(gpu_.end_capture(stream).ok());
}

TEST_F(SimHazards, RecordOnACapturingStreamIsRefusedAndIsNone) {
  const StreamRef stream = gpu_.new_stream();
  gpu_.begin_capture(stream, CaptureMode::kGlobal);
  EXPECT_EQ(error_of(gpu_.record(stream)), Errc::kCaptureActive);
  EXPECT_TRUE(gpu_.end_capture(stream).ok());
  EXPECT_EQ(gpu_.hazard_count(), 0u);
}

TEST_F(SimHazards, ACapturedLaunchRunsOnlyWhenItsGraphIsReplayed) {
  const SimPage page = make_page(gpu_);
  gpu_.launch(main_, {writes(page.range, 5)});
  gpu_.begin_capture(main_, CaptureMode::kGlobal);
  gpu_.launch(main_, {writes(page.range, 6)});
  gpu_.launch(main_, {reads(page.range, 6)});
  const GraphId graph = gpu_.end_capture(main_).value();
  gpu_.launch(main_, {reads(page.range, 5)});
  EXPECT_EQ(joined_hazards(gpu_), "");
  gpu_.replay_graph(graph, gpu_.new_stream());
  gpu_.launch(main_, {reads(page.range, 6)});
  EXPECT_EQ(joined_hazards(gpu_), "");
  gpu_.destroy_graph(graph);
  gpu_.replay_graph(graph, main_);
  EXPECT_TRUE(is_the_hazard(gpu_, {"no such graph"}));
}

TEST_F(SimHazards, AGraphReplayedOverMemoryThatIsGoneNamesCaptureAndUnmap) {
  const SimPage page = make_page(gpu_);
  gpu_.begin_capture(main_, CaptureMode::kGlobal);  // 5
  gpu_.launch(main_, {writes(page.range, 6)});
  const GraphId graph = gpu_.end_capture(main_).value();
  ASSERT_TRUE(gpu_.unmap(page.range).ok());  // 8
  gpu_.replay_graph(graph, main_);
  EXPECT_TRUE(
      is_the_hazard(gpu_, {"(graph 1)", "begin_capture #5", "nothing is mapped", "unmap #8"}));
}

TEST_F(SimHazards, AGraphReplayedOnAnotherStreamThanItsMemoryWasOrderedOnIsSeen) {
  const SimPage page = make_page(gpu_);
  const StreamRef other = gpu_.new_stream();
  gpu_.begin_capture(main_, CaptureMode::kGlobal);
  gpu_.launch(main_, {writes(page.range, 6)});
  const GraphId graph = gpu_.end_capture(main_).value();
  gpu_.set_manual(true);
  gpu_.launch(main_, {writes(page.range, 5)});
  const auto reader = gpu_.launch(main_, {reads(page.range, 5)});
  gpu_.replay_graph(graph, other);
  gpu_.complete(main_, 1);
  gpu_.complete(other);
  gpu_.complete(main_);
  EXPECT_TRUE(is_the_hazard(gpu_, {name("read", reader), "finds tag 6"}));
}

TEST_F(SimHazards, KeepsTheFirstHundredTextsAndCountsAll) {
  for (int i = 0; i < 150; ++i) gpu_.recycle(EventId{12345});
  EXPECT_EQ(gpu_.hazards().size(), 100u);
  EXPECT_EQ(gpu_.hazard_count(), 150u);
}

TEST(SimDriver, WithoutChecksMisuseIsRefusedAllTheSameButNotNoted) {
  SimOptions options;
  options.check_hazards = false;
  SimDriver gpu(options);
  EXPECT_EQ(error_of(gpu.release(HandleId{9})), Errc::kInvalidArgument);
  gpu.launch(gpu.default_stream(), {reads({DeviceAddr{4096}, 512_B}, 5)});
  EXPECT_EQ(gpu.hazard_count(), 0u);
}

// Contents against a model too simple to be wrong: a tag for each granule.
TEST(SimContents, AgreeWithAnArrayOfGranulesUnderRandomWrites) {
  std::mt19937 random(1);
  constexpr std::uint64_t kGranules = 64;
  Contents contents({kGranules * Contents::kGranule});
  std::array<std::uint64_t, kGranules> model{};
  for (int step = 0; step < 20'000; ++step) {
    const std::uint64_t begin = random() % kGranules;
    const std::uint64_t count = 1 + random() % (kGranules - begin);
    const std::uint64_t tag = 1 + random() % 4;
    const std::uint64_t offset = begin * Contents::kGranule;
    const std::uint64_t size = count * Contents::kGranule - random() % Contents::kGranule;
    if (random() % 2 == 0) {
      contents.write(offset, size, tag, {1, StreamId{1}, {}});
      std::fill_n(model.begin() + static_cast<std::ptrdiff_t>(begin), count, tag);
    }
    const bool all_equal = std::all_of(model.begin() + static_cast<std::ptrdiff_t>(begin),
                                       model.begin() + static_cast<std::ptrdiff_t>(begin + count),
                                       [&](std::uint64_t found) { return found == tag; });
    ASSERT_EQ(contents.find_other(offset, size, tag) == nullptr, all_equal) << "step " << step;
    ASSERT_LE(contents.run_count(), kGranules);
  }
}

TEST(SimAddressSpace, MergesWhatComesBackWithBothNeighbours) {
  AddressSpace space({DeviceAddr{(4_MiB).n}, 8_MiB});
  const AddrRange a = *space.take(2_MiB, 2_MiB);
  const AddrRange b = *space.take(2_MiB, 2_MiB);
  const AddrRange c = *space.take(4_MiB, 4_MiB);
  EXPECT_FALSE(space.take(512_B, 512_B).has_value());
  space.give_back(a);
  space.give_back(c);
  space.give_back(b);
  EXPECT_EQ(space.take(8_MiB, 4_MiB)->begin, a.begin);
}

// Time.

TEST(SimClock, AnEventCompletesItsLagAfterItWasRecorded) {
  SimDriver gpu;
  gpu.set_lag_us(20'000);
  gpu.advance_to(500);
  const EventId event = gpu.record(gpu.default_stream()).value();
  EXPECT_FALSE(gpu.query(event).value());
  gpu.advance_to(20'499);
  EXPECT_FALSE(gpu.query(event).value());
  gpu.advance_to(20'500);
  EXPECT_TRUE(gpu.query(event).value());
  gpu.set_lag_us(50'000);
  EXPECT_TRUE(gpu.query(event).value());
}

TEST(SimClock, NeverGoesBack) {
  SimDriver gpu;
  gpu.advance_to(100);
  gpu.advance_to(50);
  EXPECT_EQ(gpu.now_us(), 100);
}

TEST(SimClock, AStreamCanHaveALagOfItsOwnAndStaysInOrder) {
  SimDriver gpu;
  const StreamRef slow = gpu.new_stream();
  gpu.set_lag_us(10);
  gpu.set_lag_us(slow, 100);
  const EventId quick = gpu.record(gpu.default_stream()).value();
  const EventId first = gpu.record(slow).value();
  gpu.set_lag_us(slow, 0);
  const EventId second = gpu.record(slow).value();
  gpu.advance_to(10);
  EXPECT_TRUE(gpu.query(quick).value());
  EXPECT_FALSE(gpu.query(second).value());  // not before what is ahead of it
  gpu.advance_to(100);
  EXPECT_TRUE(gpu.query(first).value());
  EXPECT_TRUE(gpu.query(second).value());
}

TEST(SimClock, WaitMovesItToTheCompletionAndAddsUpHowFar) {
  SimDriver gpu;
  gpu.set_lag_us(300);
  const EventId event = gpu.record(gpu.default_stream()).value();
  gpu.advance_to(100);
  EXPECT_TRUE(gpu.wait(event).ok());
  EXPECT_EQ(gpu.now_us(), 300);
  EXPECT_EQ(gpu.waited_us(), 200);
  EXPECT_EQ(gpu.waits(), 1u);
  EXPECT_TRUE(gpu.wait(event).ok());
  EXPECT_EQ(gpu.waited_us(), 200);
  EXPECT_EQ(gpu.waits(), 1u);
}

TEST(SimClock, APlainFreeWaitsForTheWholeDevice) {
  SimDriver gpu;
  gpu.set_lag_us(300);
  const DeviceAddr address = gpu.allocate(1_KiB).value();
  const EventId event = gpu.record(gpu.new_stream()).value();
  EXPECT_TRUE(gpu.free(address).ok());
  EXPECT_TRUE(gpu.query(event).value());
  EXPECT_EQ(gpu.waited_us(), 300);
}

TEST(SimClock, ServesReplayWithoutChecksTheSame) {
  SimOptions options;
  options.check_hazards = false;
  SimDriver gpu(options);
  gpu.set_lag_us(100);
  gpu.launch(gpu.default_stream(), {});
  const EventId event = gpu.record(gpu.default_stream()).value();
  EXPECT_FALSE(gpu.query(event).value());
  gpu.advance_to(99);
  EXPECT_FALSE(gpu.query(event).value());
  EXPECT_TRUE(gpu.wait(event).ok());
  EXPECT_EQ(gpu.now_us(), 100);
  gpu.set_manual(true);
  const EventId held = gpu.record(gpu.default_stream()).value();
  gpu.advance_to(1'000'000);
  EXPECT_FALSE(gpu.query(held).value());
  gpu.complete_all();
  EXPECT_TRUE(gpu.query(held).value());
}

TEST(SimManualMode, NothingCompletesUntilItIsTold) {
  SimDriver gpu;
  const StreamRef stream = gpu.default_stream();
  gpu.set_manual(true);
  gpu.launch(stream, {});
  const EventId first = gpu.record(stream).value();
  gpu.launch(stream, {});
  const EventId second = gpu.record(stream).value();
  gpu.advance_to(1'000'000);
  EXPECT_FALSE(gpu.query(first).value());
  EXPECT_EQ(gpu.queued(stream), 4u);
  gpu.complete(stream, 2);
  EXPECT_TRUE(gpu.query(first).value());
  EXPECT_FALSE(gpu.query(second).value());
  gpu.complete_all();
  EXPECT_TRUE(gpu.query(second).value());
}

TEST(SimManualMode, WaitRunsTheStreamUpToTheEventAndNoFurther) {
  SimDriver gpu;
  const StreamRef stream = gpu.default_stream();
  const StreamRef other = gpu.new_stream();
  gpu.set_manual(true);
  const EventId elsewhere = gpu.record(other).value();
  gpu.launch(stream, {});
  const EventId event = gpu.record(stream).value();
  gpu.launch(stream, {});
  EXPECT_TRUE(gpu.wait(event).ok());
  EXPECT_TRUE(gpu.query(event).value());
  EXPECT_EQ(gpu.queued(stream), 1u);
  EXPECT_FALSE(gpu.query(elsewhere).value());
  EXPECT_EQ(gpu.waits(), 1u);
  EXPECT_EQ(gpu.waited_us(), 0);
}

TEST(SimManualMode, OfOneStreamLeavesTheOthersRunning) {
  SimDriver gpu;
  const StreamRef held = gpu.new_stream();
  gpu.set_manual(held, true);
  const EventId stuck = gpu.record(held).value();
  const EventId done = gpu.record(gpu.default_stream()).value();
  EXPECT_FALSE(gpu.query(stuck).value());
  EXPECT_TRUE(gpu.query(done).value());
  gpu.set_manual(held, false);
  EXPECT_TRUE(gpu.query(stuck).value());
}

TEST(SimManualMode, EndingItGivesQueuedWorkTheLagOfItsStream) {
  SimDriver gpu;
  gpu.set_manual(true);
  const EventId event = gpu.record(gpu.default_stream()).value();
  gpu.advance_to(1'000);
  gpu.set_lag_us(50);
  gpu.set_manual(false);
  EXPECT_FALSE(gpu.query(event).value());
  EXPECT_TRUE(gpu.wait(event).ok());
  EXPECT_EQ(gpu.now_us(), 1'050);
  EXPECT_TRUE(gpu.query(event).value());
}

TEST(SimStreams, StreamWaitOrdersWorkBehindAnotherStream) {
  SimDriver gpu;
  const StreamRef writer = gpu.new_stream();
  const StreamRef reader = gpu.new_stream();
  const SimPage page = make_page(gpu);
  gpu.set_manual(true);
  gpu.launch(writer, {writes(page.range, 5)});
  const EventId event = gpu.record(writer).value();
  gpu.stream_wait(reader, event);
  gpu.launch(reader, {reads(page.range, 5)});
  gpu.complete(reader);  // makes the writer go first
  EXPECT_EQ(joined_hazards(gpu), "");
  EXPECT_TRUE(gpu.query(event).value());

  gpu.set_manual(false);
  gpu.set_lag_us(writer, 500);
  gpu.launch(writer, {writes(page.range, 6)});
  const EventId later = gpu.record(writer).value();
  gpu.stream_wait(reader, later);
  gpu.launch(reader, {reads(page.range, 6)});
  gpu.advance_to(500);
  EXPECT_EQ(gpu.queued(reader), 0u);
  EXPECT_EQ(joined_hazards(gpu), "");
}

TEST(SimDriver, TheSameProgramIsTheSameRun) {
  const auto run = [] {
    SimDriver gpu;
    std::mt19937 random(7);
    std::string text;
    std::vector<SimPage> pages;
    std::vector<StreamRef> streams{gpu.default_stream(), gpu.new_stream(), gpu.new_stream()};
    for (int i = 0; i < 8; ++i) pages.push_back(make_page(gpu));
    gpu.set_lag_us(40);
    for (int step = 0; step < 500; ++step) {
      const AddrRange range = pages[random() % pages.size()].range;
      const StreamRef stream = streams[random() % streams.size()];
      gpu.launch(stream, {random() % 2 == 0 ? reads(range, random() % 3)
                                            : writes(range, 1 + random() % 2)});
      gpu.advance_by(random() % 30);
      text += std::to_string(gpu.hazard_count()) + " ";
    }
    return text + joined_hazards(gpu);
  };
  EXPECT_EQ(run(), run());
}

// Failures on demand.

TEST(SimFaults, FailTheNthCallOfOneKindOnce) {
  SimDriver gpu;
  gpu.fail_nth(DriverCall::kCreate, 2);
  EXPECT_TRUE(gpu.create(2_MiB).ok());
  const auto failed = gpu.create(2_MiB);
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code, Errc::kOutOfMemory);
  EXPECT_EQ(failed.error().requested, 2_MiB);
  EXPECT_TRUE(gpu.create(2_MiB).ok());
  EXPECT_EQ(gpu.faults_fired(), 1u);
  EXPECT_EQ(gpu.handle_count(), 2u);
  EXPECT_EQ(gpu.hazard_count(), 0u);
}

TEST(SimFaults, FailTheNthCallOfAnyKindAndLeaveNoTrace) {
  std::uint64_t n = 1;
  for (;; ++n) {
    SCOPED_TRACE(n);
    SimDriver gpu;
    gpu.fail_nth_any(n);
    const auto range = gpu.reserve(2_MiB, 2_MiB);
    const auto handle = gpu.create(2_MiB);
    const Bytes created = gpu.reserved_bytes();
    EXPECT_EQ(created, handle.ok() ? 2_MiB : 0_B);
    if (range.ok() && handle.ok()) {
      const bool is_mapped = gpu.map(range.value(), handle.value()).ok();
      EXPECT_EQ(gpu.mapping_count(), is_mapped ? 1u : 0u);
      if (is_mapped) {
        (void)gpu.set_access(range.value());
        if (!gpu.unmap(range.value()).ok()) {
          EXPECT_EQ(gpu.mapping_count(), 1u);
          EXPECT_TRUE(gpu.unmap(range.value()).ok());
        }
      }
    }
    if (handle.ok() && !gpu.release(handle.value()).ok()) {
      EXPECT_TRUE(gpu.release(handle.value()).ok());
    }
    if (range.ok()) {
      EXPECT_TRUE(gpu.unreserve(range.value()).ok());
    }
    EXPECT_TRUE(gpu.empty());
    EXPECT_EQ(joined_hazards(gpu), "");
    if (gpu.faults_fired() == 0) break;
  }
  EXPECT_EQ(n, 7u);  // reserve, create, map, set_access, unmap, release, and none
}

TEST(SimFaults, FailAlwaysUntilCleared) {
  SimDriver gpu;
  gpu.fail_always(DriverCall::kQuery);
  const EventId event = gpu.record(gpu.default_stream()).value();
  EXPECT_EQ(error_of(gpu.query(event)), Errc::kDriverFailure);
  EXPECT_FALSE(gpu.query(event).ok());
  gpu.clear_failures();
  EXPECT_TRUE(gpu.query(event).value());
  gpu.fail_nth(DriverCall::kCreate, 1);  // brings nothing back that was cleared
  EXPECT_TRUE(gpu.query(event).ok());
  EXPECT_EQ(gpu.faults_fired(), 2u);
}

TEST(SimDriver, AfterShutDownEveryCallIsRefusedCountedAndWithoutEffect) {
  SimDriver gpu;
  const SimPage page = make_page(gpu);
  const EventId event = gpu.record(gpu.default_stream()).value();
  const DriverFigures before = gpu.meter();
  gpu.shut_down();
  EXPECT_EQ(error_of(gpu.unmap(page.range)), Errc::kShuttingDown);
  EXPECT_EQ(error_of(gpu.release(page.handle)), Errc::kShuttingDown);
  EXPECT_EQ(error_of(gpu.create(2_MiB)), Errc::kShuttingDown);
  EXPECT_EQ(error_of(gpu.query(event)), Errc::kShuttingDown);
  EXPECT_EQ(error_of(gpu.memory()), Errc::kShuttingDown);
  gpu.recycle(event);
  EXPECT_EQ(gpu.calls_after_shutdown(), 6u);
  EXPECT_EQ(gpu.mapping_count(), 1u);
  EXPECT_EQ(gpu.live_events(), 1u);
  EXPECT_EQ(gpu.meter().calls, before.calls);
  EXPECT_EQ(gpu.hazard_count(), 0u);
}

TEST(SimDriver, ACallThatTheHookHoldsBackLetsOtherThreadsThrough) {
  SimDriver gpu;
  std::atomic<bool> is_stuck{false};
  std::atomic<bool> may_go{false};
  gpu.set_call_hook([&](DriverCall call) {
    if (call != DriverCall::kCreate) return;
    is_stuck = true;
    while (!may_go) std::this_thread::yield();
  });
  std::thread slow([&] { EXPECT_TRUE(gpu.create(2_MiB).ok()); });
  while (!is_stuck) std::this_thread::yield();
  EXPECT_EQ(gpu.handle_count(), 0u);
  EXPECT_TRUE(gpu.reserve(2_MiB, 2_MiB).ok());
  may_go = true;
  slow.join();
  EXPECT_EQ(gpu.handle_count(), 1u);
  gpu.set_call_hook(nullptr);
  EXPECT_TRUE(gpu.create(2_MiB).ok());
}

TEST(SimDriver, StandsUpToManyThreads) {
  SimDriver gpu;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&gpu, t] {
      const StreamRef stream = gpu.new_stream();
      for (int i = 0; i < 300; ++i) {
        RelaxedCapture relaxed(gpu);
        const SimPage page = make_page(gpu);
        const auto tag = static_cast<std::uint64_t>(t + 1);
        gpu.launch(stream, {writes(page.range, tag)});
        gpu.launch(stream, {reads(page.range, tag)});
        const EventId event = gpu.record(stream).value();
        gpu.advance_by(1);
        EXPECT_TRUE(gpu.wait(event).ok());
        gpu.recycle(event);
        drop_page(gpu, page);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(joined_hazards(gpu), "");
  EXPECT_TRUE(gpu.empty());
}

// Memory and limits.

TEST(SimDriver, OccupiedMemoryIsNotFree) {
  SimOptions options;
  options.capacity = 64_MiB;
  SimDriver gpu(options);
  gpu.occupy(61_MiB);
  EXPECT_EQ(gpu.memory().value().free, 3_MiB);
  EXPECT_EQ(error_of(gpu.create(4_MiB)), Errc::kOutOfMemory);
  EXPECT_TRUE(gpu.create(2_MiB).ok());
  EXPECT_EQ(error_of(gpu.allocate(2_MiB)), Errc::kOutOfMemory);
  gpu.occupy(70_MiB);
  EXPECT_EQ(gpu.memory().value().free, 0_B);
  gpu.occupy(0_B);
  EXPECT_EQ(gpu.memory().value().free, 62_MiB);
  EXPECT_EQ(gpu.reserved_bytes(), 2_MiB);
  EXPECT_EQ(gpu.hazard_count(), 0u);
}

TEST(SimDriver, SetAccessFailsPastTheCeilingOfMappings) {
  SimOptions options;
  options.max_mappings = 2;
  SimDriver gpu(options);
  const SimPage first = make_page(gpu);
  (void)make_page(gpu);
  const AddrRange range = gpu.reserve(2_MiB, 2_MiB).value();
  ASSERT_TRUE(gpu.map(range, first.handle).ok());
  EXPECT_EQ(error_of(gpu.set_access(range)), Errc::kOutOfMemory);
  ASSERT_TRUE(gpu.unmap(first.range).ok());
  EXPECT_TRUE(gpu.set_access(range).ok());
  EXPECT_EQ(gpu.hazard_count(), 0u);
}

TEST(SimDriver, AddressSpaceRunsOutAsAnErrorOfItsOwn) {
  SimOptions options;
  options.address_space = 4_MiB;
  SimDriver gpu(options);
  const auto range = gpu.reserve(4_MiB, 2_MiB);
  ASSERT_TRUE(range.ok());
  EXPECT_EQ(error_of(gpu.reserve(2_MiB, 2_MiB)), Errc::kOutOfAddressSpace);
  EXPECT_TRUE(gpu.unreserve(range.value()).ok());
  EXPECT_TRUE(gpu.reserve(2_MiB, 2_MiB).ok());
}

TEST(SimDriver, InPlainModeVirtualMemoryIsUnsupported) {
  SimOptions options;
  options.virtual_memory = false;
  SimDriver gpu(options);
  EXPECT_FALSE(gpu.traits().virtual_memory);
  EXPECT_FALSE(gpu.traits().exportable);
  EXPECT_EQ(error_of(gpu.reserve(2_MiB, 2_MiB)), Errc::kUnsupported);
  EXPECT_EQ(error_of(gpu.create(2_MiB)), Errc::kUnsupported);
  const DeviceAddr address = gpu.allocate(3_MiB).value();
  gpu.launch(gpu.default_stream(), {writes({address, 3_MiB}, 5), reads({address, 3_MiB}, 0)});
  EXPECT_EQ(gpu.hazard_count(), 1u);
  EXPECT_TRUE(gpu.free(address).ok());
  EXPECT_TRUE(gpu.empty());
}

TEST(SimDriver, AnImportedHandleIsTheSameMemoryUntilTheLastIsReleased) {
  SimDriver gpu;
  const HandleId ours = gpu.create(2_MiB).value();
  const int fd = ::dup(gpu.export_handle(ours).value());
  const HandleId theirs = gpu.import_handle(fd).value();
  EXPECT_NE(ours, theirs);
  EXPECT_EQ(gpu.reserved_bytes(), 2_MiB);
  EXPECT_TRUE(gpu.release(ours).ok());
  EXPECT_EQ(gpu.reserved_bytes(), 2_MiB);
  EXPECT_TRUE(gpu.release(theirs).ok());
  EXPECT_EQ(gpu.reserved_bytes(), 0_B);
  EXPECT_EQ(gpu.hazard_count(), 0u);
  EXPECT_FALSE(gpu.import_handle(fd).ok());
  EXPECT_EQ(gpu.hazard_count(), 1u);
  (void)::close(fd);
}

TEST(SimDriver, ADescriptorMeansNothingToAnotherDevice) {
  SimDriver gpu;
  SimDriver other;
  const HandleId ours = gpu.create(2_MiB).value();
  EXPECT_FALSE(other.import_handle(gpu.export_handle(ours).value()).ok());
  EXPECT_EQ(other.hazard_count(), 1u);
  EXPECT_TRUE(gpu.release(ours).ok());
}

TEST(SimDriver, ACopyUnderQueuedWorkIsAHazard) {
  SimDriver gpu;
  const SimPage from = make_page(gpu);
  const SimPage to = make_page(gpu);
  gpu.launch(gpu.default_stream(), {writes(from.range, 5)});
  gpu.set_manual(true);
  gpu.launch(gpu.default_stream(), {writes({from.range.begin + 1_MiB, 1_MiB}, 6)});
  EXPECT_TRUE(gpu.copy(to.range.begin, from.range.begin, 1_MiB).ok());
  EXPECT_EQ(gpu.hazard_count(), 0u) << joined_hazards(gpu);
  EXPECT_TRUE(gpu.copy(to.range.begin, from.range.begin, 2_MiB).ok());
  EXPECT_TRUE(is_the_hazard(gpu, {"copy #", "still used by", "which has not run"}));
  gpu.clear_hazards();
  EXPECT_TRUE(gpu.synchronize().ok());
  EXPECT_TRUE(gpu.copy(to.range.begin, from.range.begin, 2_MiB).ok());
  gpu.launch(gpu.default_stream(), {reads({to.range.begin, 1_MiB}, 5)});
  gpu.launch(gpu.default_stream(), {reads({to.range.begin + 1_MiB, 1_MiB}, 6)});
  gpu.complete_all();
  EXPECT_EQ(gpu.hazard_count(), 0u) << joined_hazards(gpu);
  EXPECT_FALSE(gpu.copy(to.range.begin, to.range.begin + 1_MiB, 2_MiB).ok());
  EXPECT_FALSE(gpu.copy(to.range.begin, DeviceAddr{4096}, 1_MiB).ok());
  EXPECT_EQ(gpu.hazard_count(), 2u);
}

TEST(SimDriver, SynchronizeInAForeignCaptureEndsIt) {
  SimDriver gpu;
  const StreamRef stream = gpu.new_stream();
  gpu.begin_capture(stream, CaptureMode::kGlobal);
  EXPECT_FALSE(gpu.synchronize().ok());
  EXPECT_FALSE(gpu.end_capture(stream).ok());
}

TEST(SimMachine, OnlyPeersThatWereNamedMayUseAPage) {
  SimMachine machine(3);
  SimDriver& gpu = machine.device(0);
  const SimPage page = make_page(gpu);
  EXPECT_FALSE(gpu.peer_may_use(page.range, 1));
  EXPECT_TRUE(gpu.set_access(page.range, {1}).ok());
  EXPECT_TRUE(gpu.peer_may_use(page.range, 1));
  EXPECT_FALSE(gpu.peer_may_use(page.range, 2));
  EXPECT_TRUE(gpu.set_access(page.range, {2}).ok());  // adds
  EXPECT_TRUE(gpu.peer_may_use(page.range, 1));
  EXPECT_TRUE(gpu.peer_may_use(page.range, 2));
  EXPECT_TRUE(gpu.unmap(page.range).ok());
  EXPECT_TRUE(gpu.map(page.range, page.handle).ok());
  EXPECT_TRUE(gpu.set_access(page.range).ok());
  EXPECT_FALSE(gpu.peer_may_use(page.range, 1));
  EXPECT_EQ(error_of(gpu.set_access(page.range, {3})), Errc::kInvalidArgument);
  EXPECT_EQ(error_of(gpu.set_access(page.range, {0})), Errc::kInvalidArgument);
}

TEST(SimMachine, AStreamOfAnotherDeviceIsNamedWithItsDevice) {
  SimDriver gpu;
  const StreamRef theirs = gpu.new_stream_of(1);
  EXPECT_TRUE(gpu.record(theirs).ok());
  const StreamRef as_if_ours{theirs.id, theirs.native};
  EXPECT_EQ(error_of(gpu.record(as_if_ours)), Errc::kInvalidArgument);
  EXPECT_TRUE(is_the_hazard(gpu, {"record #", "is not a stream of this device"}));
}

TEST(StreamNames, OtherDevicesDefaultStreamsHaveNamesOfTheirOwn) {
  const StreamRef default_stream{id_of_permanent(0), 0};
  std::set<StreamId> names{default_stream.id};
  for (int device = 0; device < 64; ++device) {
    const StreamRef named = of_other_device(default_stream, device);
    EXPECT_TRUE(names.insert(named.id).second) << device;
    EXPECT_EQ(named.device, device);
    EXPECT_EQ(of_other_device(named, device), default_stream);
  }
}

TEST(SimMachine, DevicesShareNoAddress) {
  SimMachine machine(2);
  const AddrRange a = machine.device(0).reserve(64_TiB, 2_MiB).value();
  const AddrRange b = machine.device(1).reserve(64_TiB, 2_MiB).value();
  EXPECT_FALSE(a.overlaps(b));
  const DeviceAddr plain_a = machine.device(0).allocate(1_GiB).value();
  const DeviceAddr plain_b = machine.device(1).allocate(1_GiB).value();
  EXPECT_NE(plain_a, plain_b);
  EXPECT_FALSE(a.contains(plain_a) || a.contains(plain_b) || b.contains(plain_a));
}

// What calls cost.

TEST(SimMeter, ChargesEachCallWhatTheModelSays) {
  SimDriver gpu;
  const SimPage page = make_page(gpu);
  const double growth_us = 5789.0 / 512 + 31.9;
  EXPECT_NEAR(gpu.meter().seconds * 1e6, growth_us, 1e-6);
  EXPECT_NEAR(gpu.meter().seconds_growth * 1e6, growth_us, 1e-6);
  EXPECT_EQ(gpu.meter().bytes_created, 2_MiB);
  drop_page(gpu, page);
  EXPECT_NEAR(gpu.meter().seconds_inline * 1e6, growth_us + 20.6 + 7012.0 / 512, 1e-6);
  EXPECT_NEAR(gpu.meter().seconds_growth * 1e6, growth_us, 1e-6);
}

TEST(SimMeter, CreatingTwoMebibytesCosts11Microseconds) {
  SimDriver gpu;
  (void)gpu.create(2_MiB);
  EXPECT_NEAR(gpu.meter().seconds * 1e6, 11.3, 0.05);
}

TEST(SimMeter, ChargesSetAccessOverManyMappingsAsSoManyCalls) {
  SimDriver gpu;
  const AddrRange range = gpu.reserve(12_MiB, 2_MiB).value();
  const HandleId small = gpu.create(4_MiB).value();
  const HandleId large = gpu.create(8_MiB).value();
  ASSERT_TRUE(gpu.map(part(range, 0_B, 4_MiB), small).ok());
  ASSERT_TRUE(gpu.map(part(range, 4_MiB, 8_MiB), large).ok());
  gpu.reset_meter();
  ASSERT_TRUE(gpu.set_access(range).ok());
  const CostModel costs;
  EXPECT_EQ(gpu.meter().count(DriverCall::kSetAccess), 2u);
  EXPECT_NEAR(gpu.meter().seconds_growth * 1e6,
              costs.microseconds(DriverCall::kSetAccess, 4_MiB) +
                  costs.microseconds(DriverCall::kSetAccess, 8_MiB),
              1e-6);
}

TEST(SimMeter, FailedCallsAreCountedAndCostNothing) {
  SimOptions options;
  options.capacity = 2_MiB;
  SimDriver gpu(options);
  EXPECT_FALSE(gpu.create(4_MiB).ok());
  EXPECT_EQ(gpu.meter().count(DriverCall::kCreate), 1u);
  EXPECT_EQ(gpu.meter().failures[static_cast<std::size_t>(DriverCall::kCreate)], 1u);
  EXPECT_DOUBLE_EQ(gpu.meter().seconds, 0);
}

TEST(SimMeter, ResetForgetsFiguresButNotWhichHandlesAreFresh) {
  SimDriver gpu;
  const AddrRange range = gpu.reserve(2_MiB, 2_MiB).value();
  const HandleId handle = gpu.create(2_MiB).value();
  gpu.reset_meter();
  EXPECT_EQ(gpu.meter().count(DriverCall::kCreate), 0u);
  ASSERT_TRUE(gpu.map(range, handle).ok());
  EXPECT_GT(gpu.meter().seconds_growth, 0);
}

}  // namespace
}  // namespace gpumemx
