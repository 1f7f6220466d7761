// SPDX-License-Identifier: BSD-3-Clause
#include "core/sharing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "driver/sim/sim_machine.hpp"
#include "support/error_of.hpp"
#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

// A block that covers all of these handles, with free pages without memory behind it.
ShareSite site_of(const std::vector<std::uint32_t>& pages, std::uint64_t room) {
  ShareSite site;
  for (const std::uint32_t n : pages) {
    site.parts.push_back({n});
    site.end += n;
  }
  site.parts.insert(site.parts.end(), room, {1, /*is_void=*/true});
  site.grid = 4;
  return site;
}

using Pages = std::vector<std::uint32_t>;

TEST(UniformPlan, LeavesHandlesOfOneSizeAsTheyAre) {
  for (const Pages& pages : {Pages{1}, {4, 4}, {32, 32, 32}, {7, 7, 7, 7}}) {
    const auto plan = plan_uniform(site_of(pages, 100));
    ASSERT_TRUE(plan);
    EXPECT_TRUE(plan->is_nothing());
    EXPECT_EQ(plan->pages, pages.front());
  }
}

TEST(UniformPlan, TakesFewLargeHandlesAndWastesLittle) {
  const auto plan = plan_uniform(site_of({32, 32, 32, 1}, 100));
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->created, (Pages{25, 25, 25, 25}));
}

TEST(UniformPlan, ReachesBeyondTheBlockOnlyWhereThereIsRoom) {
  const auto plan = plan_uniform(site_of({32, 32, 32, 1}, 0));
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->pages, 1u);  // 97 is a prime
  EXPECT_EQ(plan->created, Pages(96, 1));
  auto site = site_of({32, 32, 32, 1}, 0);
  site.parts.insert(site.parts.begin(), 3, {1, /*is_void=*/true});
  site.begin += 3;
  site.end += 3;
  const auto before = plan_uniform(site);
  ASSERT_TRUE(before);
  EXPECT_EQ(before->created, (Pages{25, 25, 25, 25}));
  EXPECT_EQ(before->keep_front, 0u);
}

TEST(UniformPlan, KeepsWhatFits) {
  const auto plan = plan_uniform(site_of({32, 32, 32, 32, 31}, 1));
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->pages, 32u);
  EXPECT_EQ(plan->keep_front, 4u);
  EXPECT_EQ(plan->created, Pages{32});
}

TEST(UniformPlan, NeverReplacesWhatASharedBlockStandsOn) {
  auto site = site_of({4, 16, 16, 2}, 10);
  site.parts.front().fixed = true;
  auto plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->pages, 4u);
  EXPECT_EQ(plan->keep_front, 1u);
  EXPECT_EQ(plan->created, Pages(9, 4));
  site.parts[3].fixed = true;  // two sizes that both have to stay
  EXPECT_FALSE(plan_uniform(site));
  site = site_of({4, 16, 16, 4}, 0);
  site.parts.front().fixed = site.parts.back().fixed = true;
  plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->keep_back, 1u);
  EXPECT_EQ(plan->created, Pages(8, 4));
}

TEST(UniformPlan, LeavesHandlesOfOthersAloneWhereItCan) {
  auto site = site_of({4, 16, 8}, 10);
  site.parts.front().has_others = true;
  auto plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->pages, 4u);
  EXPECT_FALSE(plan->disturbs_others);
  site.parts[2].has_others = true;
  plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_TRUE(plan->disturbs_others);
}

// What others had besides gets a handle of its own.
TEST(UniformPlan, FillsWhatIsLeftOfTheHandlesItReplaces) {
  auto site = site_of({6, 16, 7}, 0);
  site.parts.front().has_others = site.parts.back().has_others = true;
  site.begin = 3;
  site.end = 6 + 16 + 5;
  const auto plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->created, (Pages{3, 24, 1, 1}));  // cut where the grid is
  EXPECT_TRUE(plan->disturbs_others);
}

TEST(UniformPlan, ReachesIntoTheNextHandleWhereItMay) {
  auto site = site_of({5, 5, 2, 9}, 0);
  site.parts.front().fixed = true;
  site.begin = 4;
  site.end = 12;
  auto plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->keep_front, 2u);
  EXPECT_EQ(plan->created, (Pages{5, 1, 4, 1}));
  site.parts.back().fixed = true;
  EXPECT_FALSE(plan_uniform(site));
}

TEST(UniformPlan, TakesTheGridWhereOthersCanStandOnTheEnds) {
  auto site = site_of({6, 6, 3}, 10);
  site.fills_last = false;
  site.origin = 8;
  const auto plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->created, Pages(4, 4));
  site.fills_last = true;  // nobody else can
  EXPECT_EQ(plan_uniform(site)->created, (Pages{15}));
}

// Handles of 6 pages would do for the block, but the one behind it ends on a shared one of 4.
TEST(UniformPlan, LeavesNeighboursShareable) {
  auto site = site_of({6, 6}, 0);
  site.fills_last = false;
  site.parts.back().has_others = true;
  site.after.resize(1);
  site.after[0] = {true, Demand{12, 12, 4}};
  const auto plan = plan_uniform(site);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->created, Pages(3, 4));
  EXPECT_TRUE(plan->disturbs_others);
  EXPECT_FALSE(plan->in_the_way);
  EXPECT_TRUE(plan->is_optional);
  for (const bool is_across : {true, false}) {
    site.after[0] = {is_across, Demand{10, 10, 4}};  // no handles of 4 end where the block's must
    EXPECT_TRUE(plan_uniform(site)->is_nothing());
    EXPECT_TRUE(plan_uniform(site)->in_the_way);
  }
  site.after[0] = {true, Demand{10, 12, 0}};  // 6 will do
  EXPECT_TRUE(plan_uniform(site)->is_nothing());
  EXPECT_FALSE(plan_uniform(site)->in_the_way);
}

class SharingTest : public AllocatorTest {
 protected:
  SharingTest() : AllocatorTest(device_of(64_GiB)) {}

  // Every MiB of a block with a tag of its own.
  void fill(DeviceAddr at, Bytes size, std::uint64_t tag) {
    for (Bytes done; done < size; done += 1_MiB) {
      gpu_.launch(main_, {writes({at + done, std::min(1_MiB, size - done)}, tag + (done.n >> 20))});
    }
  }
  void check(DeviceAddr at, Bytes size, std::uint64_t tag) {
    for (Bytes done; done < size; done += 1_MiB) {
      gpu_.launch(main_, {reads({at + done, std::min(1_MiB, size - done)}, tag + (done.n >> 20))});
    }
    gpu_.complete_all();
    ASSERT_EQ(joined_hazards(gpu_), "");
  }
  SharedRange share(DeviceAddr at) {
    const auto shared = allocator_->share(at);
    EXPECT_TRUE(shared.ok()) << (shared.ok() ? "" : shared.error().where);
    EXPECT_EQ(allocator_->validate().value_or(""), "");
    return shared.ok() ? shared.value() : SharedRange{};
  }
  // What a receiver does; the address of the whole range there.
  static std::vector<ForeignHandle> received(const SharedRange& shared) {
    std::vector<ForeignHandle> handles;
    for (const SharedHandle& h : shared.handles) handles.push_back({h.size, h.descriptor});
    return handles;
  }
  static std::vector<int> descriptors(const SharedRange& shared) {
    std::vector<int> all;
    for (const SharedHandle& h : shared.handles) all.push_back(h.descriptor);
    return all;
  }
  DeviceAddr import(const SharedRange& shared) {
    const auto address = allocator_->import_memory(received(shared));
    EXPECT_TRUE(address.ok()) << (address.ok() ? "" : address.error().where);
    return address.ok() ? address.value() : DeviceAddr{};
  }
};

TEST_F(SharingTest, ABlockOverHandlesOfOneSizeIsOnlyExported) {
  const DeviceAddr a = alloc(64_MiB);
  gpu_.reset_meter();
  const SharedRange shared = share(a);
  EXPECT_EQ(shared.range, (AddrRange{a, 64_MiB}));
  EXPECT_TRUE(shared.is_uniform());
  EXPECT_EQ(calls(DriverCall::kExport), shared.handles.size());
  EXPECT_EQ(calls(DriverCall::kCopy) + calls(DriverCall::kSynchronize) + mapping_calls(), 0u);
  free(a);
}

TEST_F(SharingTest, ABlockOverMixedHandlesGetsSomeOfOneSizeInPlace) {
  const DeviceAddr a = alloc(100_MiB);  // 16 MiB each, and 4
  fill(a, 100_MiB, 1000);
  const Bytes before = reserved();
  const SharedRange shared = share(a);
  EXPECT_GT(paths().rebacked, 0u);
  EXPECT_EQ(shared.range.begin, a);
  EXPECT_GE(shared.range.size, 100_MiB);
  EXPECT_TRUE(shared.is_uniform());
  EXPECT_EQ(shared.handles.front().size * shared.handles.size(), shared.range.size);
  EXPECT_LE(shared.handles.size(), 8u);
  check(a, 100_MiB, 1000);
  const DeviceAddr there = import(shared);
  check(there, 100_MiB, 1000);
  fill(there, 100_MiB, 2000);  // a consumer may write
  check(a, 100_MiB, 2000);
  // The old handles are there for others.
  EXPECT_GE(reserved(), before + shared.range.size);
  allocator_->close_import(there);
  free(a);
}

TEST_F(SharingTest, TheNextShareOfABlockCostsNothing) {
  const DeviceAddr a = alloc(100_MiB);
  const SharedRange first = share(a);
  gpu_.reset_meter();
  const SharedRange second = share(a + 50_MiB);  // any address in it
  EXPECT_EQ(second.range, first.range);
  EXPECT_EQ(descriptors(second), descriptors(first));
  EXPECT_EQ(calls(DriverCall::kCopy) + calls(DriverCall::kSynchronize) + mapping_calls(), 0u);
  free(a);
  // The memory behind it is the same for the next block.
  const DeviceAddr b = alloc(100_MiB);
  EXPECT_EQ(b, a);
  EXPECT_EQ(descriptors(share(b)), descriptors(first));
  free(b);
}

TEST_F(SharingTest, ReplacingWaitsForTheWorkOfAllStreams) {
  const DeviceAddr a = alloc(100_MiB);
  gpu_.set_lag_us(500);
  const StreamRef other = gpu_.new_stream();  // the allocator never saw it
  gpu_.launch(other, {writes({a, 100_MiB}, 7)});
  const SharedRange shared = share(a);
  EXPECT_GE(gpu_.now_us(), 500);
  EXPECT_EQ(joined_hazards(gpu_), "");
  const DeviceAddr there = import(shared);
  gpu_.launch(main_, {reads({there, 100_MiB}, 7)});
  gpu_.complete_all();
  allocator_->close_import(there);
  free(a);
}

TEST_F(SharingTest, WorkQueuedMeanwhileRunsOnTheNewMemory) {
  for (const DriverCall when : {DriverCall::kCopy, DriverCall::kUnmap}) {
    const DeviceAddr a = alloc(100_MiB);
    fill(a, 100_MiB, 1000);
    bool is_done = false;
    gpu_.set_call_hook([&](DriverCall call) {
      if (call != when || std::exchange(is_done, true)) return;
      fill(a, 50_MiB, 3000);  // by another thread of the program, before the memory is away
    });
    const DeviceAddr there = import(share(a));
    gpu_.set_call_hook({});
    EXPECT_TRUE(is_done);
    check(a, 50_MiB, 3000);
    check(a + 50_MiB, 50_MiB, 1050);
    check(there, 50_MiB, 3000);
    allocator_->close_import(there);
    free(a);
    allocator_->trim({});
  }
}

TEST_F(SharingTest, MemoryThatWasFreedInACaptureCanBeReplaced) {
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr a = alloc(100_MiB);
  allocator_->begin_capture();
  free(a);
  allocator_->end_capture();
  ASSERT_EQ(alloc(100_MiB), a);
  (void)share(a);
  ASSERT_GT(paths().rebacked, 0u);
  free(alloc(100_MiB));  // on the handles that stood there before
  free(a);
  allocator_->trim({});
  EXPECT_EQ(allocator_->validate().value_or(""), "");
  EXPECT_EQ(reserved(), 0_B);
  allocator_->release_pool(pool);
}

TEST_F(SharingTest, SmallBlocksOfOneHandleShareIt) {
  std::vector<DeviceAddr> blocks;
  for (int i = 0; i < 40; ++i) blocks.push_back(alloc(100_KiB));
  std::map<std::vector<int>, int> handles;
  for (const DeviceAddr a : blocks) {
    fill(a, 100_KiB, a.n);
    const SharedRange shared = share(a);
    EXPECT_LE(shared.range.begin, a);
    EXPECT_LE(a + 100_KiB, shared.range.end());
    ++handles[descriptors(shared)];
  }
  EXPECT_LE(handles.size(), 4u);  // two handles, and blocks that touch both
  EXPECT_EQ(paths().rebacked, 0u);
  for (const DeviceAddr a : blocks) check(a, 100_KiB, a.n);
  free(blocks);
}

TEST_F(SharingTest, NeighboursKeepTheirContent) {
  // Of the heap of odd sizes: blocks share handles at their ends.
  std::vector<DeviceAddr> blocks;
  const Bytes size = 11_MiB + 512_B;
  for (int i = 0; i < 8; ++i) blocks.push_back(alloc(size));
  free(blocks[4]);
  blocks[4] = alloc(3_MiB + 512_B);
  const auto size_of = [&](std::size_t i) { return i == 4 ? 3_MiB + 512_B : size; };
  for (std::size_t i = 0; i < blocks.size(); ++i) fill(blocks[i], size_of(i), 1000 * (i + 1));
  for (const std::size_t i : {2u, 5u, 3u, 7u, 0u}) {
    const SharedRange shared = share(blocks[i]);
    const DeviceAddr there = import(shared);
    check(there + (blocks[i] - shared.range.begin), size_of(i), 1000 * (i + 1));
    allocator_->close_import(there);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) check(blocks[i], size_of(i), 1000 * (i + 1));
  free(blocks);
}

TEST_F(SharingTest, WhatIsSharedStaysUnderPressure) {
  const DeviceAddr a = alloc(100_MiB);
  fill(a, 100_MiB, 1000);
  const DeviceAddr there = import(share(a));
  std::vector<DeviceAddr> others;
  for (int round = 0; round < 3; ++round) {
    for (const Bytes size : {700_MiB, 300_MiB, 130_MiB, 900_MiB, 33_MiB + 512_B}) {
      if (AllocResult got = try_alloc(size); got.ok()) others.push_back(got.address);
    }
    check(a, 100_MiB, 1000);
    check(there, 100_MiB, 1000);
    free(others);
    others.clear();
    allocator_->trim({});
  }
  fill(there, 100_MiB, 3000);
  check(a, 100_MiB, 3000);
  allocator_->close_import(there);
  free(a);
}

TEST_F(SharingTest, OtherAddressesAreRefused) {
  const DeviceAddr a = alloc(100_MiB);
  free(a);
  EXPECT_EQ(error_of(allocator_->share(a)), Errc::kInvalidArgument);
  EXPECT_EQ(error_of(allocator_->share(DeviceAddr{4096})), Errc::kInvalidArgument);
}

TEST_F(SharingTest, APlainBlockIsSharedWithItsDeviceAllocation) {
  const PoolId pool = allocator_->create_pool({.plain = true});
  const DeviceAddr a = alloc(3_MiB, permanent(main_), pool);
  const DeviceAddr b = alloc(3_MiB, permanent(main_), pool);
  const SharedRange shared = share(b);
  EXPECT_EQ(shared.range.begin, a);
  EXPECT_EQ(shared.range.size, 20_MiB);
  EXPECT_TRUE(shared.handles.empty());
  free(a);
  free(b);
  allocator_->release_pool(pool);
}

TEST_F(SharingTest, ABlockOfAPrivatePoolStaysPinned) {
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr a = alloc(100_MiB, permanent(main_), pool);
  fill(a, 100_MiB, 1000);
  share(a);
  check(a, 100_MiB, 1000);
  free(a);
  const DeviceAddr b = alloc(3800_MiB);  // all but what the pool keeps
  EXPECT_EQ(alloc(100_MiB, permanent(main_), pool), a);
  free(a);
  free(b);
  allocator_->release_pool(pool);
}

TEST_F(SharingTest, NothingIsMovedDuringACapture) {
  const DeviceAddr mixed = alloc(100_MiB);
  const DeviceAddr even = alloc(64_MiB);
  allocator_->begin_capture();
  EXPECT_EQ(error_of(allocator_->share(mixed)), Errc::kCaptureActive);
  EXPECT_TRUE(allocator_->share(even).ok());
  allocator_->end_capture();
  share(mixed);
  free(mixed);
  free(even);
}

TEST_F(SharingTest, ACaptureThatBeginsWhileTheDeviceIsWaitedForKeepsTheMemoryInPlace) {
  const DeviceAddr mixed = alloc(100_MiB);
  gpu_.set_call_hook([&](DriverCall call) {
    if (call == DriverCall::kSynchronize) allocator_->begin_capture();
  });
  EXPECT_EQ(error_of(allocator_->share(mixed)), Errc::kCaptureActive);
  gpu_.set_call_hook(nullptr);
  EXPECT_EQ(calls(DriverCall::kHold), 0u);
  allocator_->end_capture();
  share(mixed);
  free(mixed);
}

// What holds the streams would be part of the graph.
TEST_F(SharingTest, NoCaptureBeginsWhileStreamsAreHeld) {
  const DeviceAddr mixed = alloc(100_MiB);
  std::future<void> capture;
  gpu_.set_call_hook([&](DriverCall call) {
    if (call != DriverCall::kHold || capture.valid()) return;
    capture = std::async(std::launch::async, [&] { allocator_->begin_capture(); });
    EXPECT_EQ(capture.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  });
  share(mixed);
  ASSERT_TRUE(capture.valid());
  capture.get();
  gpu_.set_call_hook(nullptr);
  allocator_->end_capture();
  free(mixed);
}

TEST_F(SharingTest, AnImportThatEndsInACaptureIsClosedByTheNext) {
  const DeviceAddr a = alloc(64_MiB);
  const SharedRange shared = share(a);
  const std::uint64_t mappings = gpu_.mapping_count();
  const DeviceAddr there = import(shared);
  EXPECT_GT(gpu_.mapping_count(), mappings);
  gpu_.begin_capture(main_, CaptureMode::kGlobal);
  allocator_->begin_capture();
  allocator_->close_import(there);
  EXPECT_TRUE(gpu_.end_capture(main_).ok());
  EXPECT_GT(gpu_.mapping_count(), mappings);
  allocator_->end_capture();
  allocator_->close_import(import(shared));
  EXPECT_EQ(gpu_.mapping_count(), mappings);
  free(a);
}

TEST_F(SharingTest, ClosingAnImportWaitsForItsWork) {
  const DeviceAddr a = alloc(64_MiB);
  const DeviceAddr there = import(share(a));
  gpu_.set_lag_us(300);
  gpu_.launch(gpu_.new_stream(), {writes({there, 64_MiB}, 5)});
  allocator_->close_import(there);
  EXPECT_EQ(joined_hazards(gpu_), "");
  free(a);
}

TEST_F(SharingTest, ImportsThatAreLeftGoWithTheAllocator) {
  const DeviceAddr a = alloc(64_MiB);
  import(share(a));
  allocator_.reset();
  EXPECT_TRUE(gpu_.empty());
}

TEST_F(SharingTest, SharingNeedsRoomForTheCopyWithinTheCap) {
  const DeviceAddr a = alloc(100_MiB);
  fill(a, 100_MiB, 1000);
  free(alloc(150_MiB));
  allocator_->set_cap(260_MiB);  // with what is idle given back, there is room
  share(a);
  EXPECT_LE(reserved(), 260_MiB);
  check(a, 100_MiB, 1000);
  free(a);
  allocator_->trim({});
  const DeviceAddr b = alloc(134_MiB);
  allocator_->set_cap(200_MiB);
  EXPECT_EQ(error_of(allocator_->share(b)), Errc::kOutOfMemory);
  free(b);
}

// Placed later between two that are shared over handles that do not agree: it is shared nevertheless.
TEST_F(SharingTest, ABlockThatCanHaveNoHandlesOfOneSizeIsSharedOverSeveral) {
  free(alloc(10_MiB));  // an idle handle that is no multiple of the others
  const Bytes size = 12_MiB + 512_B;
  const DeviceAddr low = alloc(9_MiB + 512_B);
  const DeviceAddr middle = alloc(size);
  const DeviceAddr high = alloc(9_MiB + 512_B);
  free(middle);  // or the others would be laid out for its sake
  EXPECT_TRUE(share(low).is_uniform());
  EXPECT_TRUE(share(high).is_uniform());
  ASSERT_EQ(alloc(size), middle);
  fill(middle, size, 1000);
  const SharedRange shared = share(middle);
  EXPECT_FALSE(shared.is_uniform());
  const DeviceAddr there = import(shared);
  check(there + (middle - shared.range.begin), size, 1000);
  EXPECT_EQ(descriptors(share(middle)), descriptors(shared));
  allocator_->close_import(there);
  for (const DeviceAddr block : {low, middle, high}) free(block);
}

// The same, but in use all the time.
TEST_F(SharingTest, NeighboursInUseAreLaidOutForToo) {
  free(alloc(10_MiB));
  const DeviceAddr low = alloc(9_MiB + 512_B);
  const DeviceAddr middle = alloc(12_MiB + 512_B);
  const DeviceAddr high = alloc(9_MiB + 512_B);
  for (const DeviceAddr block : {low, high, middle}) EXPECT_TRUE(share(block).is_uniform());
  for (const DeviceAddr block : {low, middle, high}) free(block);
}

TEST_F(SharingTest, EveryDriverCallMayFail) {
  for (const DriverCall call :
       {DriverCall::kSynchronize, DriverCall::kHold, DriverCall::kReserve, DriverCall::kCreate,
        DriverCall::kMap, DriverCall::kSetAccess, DriverCall::kCopy, DriverCall::kUnmap,
        DriverCall::kExport, DriverCall::kRelease}) {
    for (std::uint64_t n = 1;; ++n) {
      SCOPED_TRACE(std::string(to_string(call)) + " " + std::to_string(n));
      start({});
      const DeviceAddr low = alloc(11_MiB + 512_B);
      const DeviceAddr a = alloc(37_MiB + 512_B);
      const DeviceAddr b = alloc(100_MiB);
      fill(low, 11_MiB + 512_B, 100);
      fill(a, 37_MiB + 512_B, 200);
      fill(b, 100_MiB, 300);
      const std::uint64_t fired = gpu_.faults_fired();
      gpu_.fail_nth(call, n);
      const bool first = allocator_->share(a).ok() && allocator_->share(b).ok();
      const bool has_fired = gpu_.faults_fired() > fired;
      gpu_.clear_failures();
      EXPECT_TRUE(first || has_fired);
      ASSERT_EQ(allocator_->validate().value_or(""), "");
      check(low, 11_MiB + 512_B, 100);
      check(a, 37_MiB + 512_B, 200);
      check(b, 100_MiB, 300);
      const SharedRange shared = share(b);
      const DeviceAddr there = import(shared);
      check(there + (b - shared.range.begin), 100_MiB, 300);
      allocator_->close_import(there);
      for (const DeviceAddr block : {low, a, b}) free(block);
      allocator_->trim({});
      EXPECT_EQ(reserved(), 0_B);
      if (!has_fired) break;
    }
  }
}

TEST_F(SharingTest, AnImportThatFailsLeavesNothing) {
  const DeviceAddr a = alloc(100_MiB);
  const SharedRange shared = share(a);
  std::vector<ForeignHandle> handles = received(shared);
  const std::uint64_t mappings = gpu_.mapping_count();
  const std::uint64_t known = gpu_.handle_count();
  for (const DriverCall call :
       {DriverCall::kReserve, DriverCall::kImport, DriverCall::kMap, DriverCall::kSetAccess}) {
    for (std::uint64_t n = 1;; ++n) {
      gpu_.fail_nth(call, n);
      const auto there = allocator_->import_memory(handles);
      gpu_.clear_failures();
      if (there.ok()) {
        allocator_->close_import(there.value());
        break;
      }
      EXPECT_EQ(gpu_.mapping_count(), mappings);
      EXPECT_EQ(gpu_.handle_count(), known);
    }
  }
  EXPECT_FALSE(allocator_->import_memory({}).ok());
  handles.front().size = 1_MiB;
  EXPECT_FALSE(allocator_->import_memory(handles).ok());
  handles.front() = {shared.handles.front().size, FabricHandle{}};
  EXPECT_EQ(error_of(allocator_->import_memory(handles)), Errc::kUnsupported);
  free(a);
}

TEST_F(SharingTest, NeighboursMayBeFreedMeanwhile) {
  std::uint64_t disturbed = 0;
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    start({});
    std::mt19937 random(seed);
    std::map<DeviceAddr, Bytes> live;
    const auto add = [&](int count, std::uint64_t largest) {
      for (int i = 0; i < count; ++i) {
        const Bytes size = block_size({1'100'000 + random() % largest});
        live[alloc(size)] = size;
      }
    };
    // In every other program blocks over large handles, which are larger than what others leave of them.
    const std::uint64_t large = seed % 2 == 0 ? 12'000'000 : 110'000'000;
    add(25, seed % 2 == 0 ? 30'000'000 : large);
    for (int i = 0; i < 20; ++i) {
      auto gone = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      allocator_->free(gone->first);
      live.erase(gone);
      gpu_.complete_all();
      add(static_cast<int>(random() % 2), large);
    }
    for (const auto& [at, size] : live) gpu_.launch(main_, {writes({at, size}, at.n)});
    while (live.size() > 2) {
      const auto shared = std::next(live.begin());
      const auto neighbour = random() % 2 == 0 ? live.begin() : std::next(shared);
      gpu_.set_call_hook([&](DriverCall call) {
        if (call == DriverCall::kCopy) (void)allocator_->free_if_live(neighbour->first);
      });
      share(shared->first);
      gpu_.set_call_hook({});
      gpu_.launch(main_, {reads({shared->first, shared->second}, shared->first.n)});
      (void)allocator_->free_if_live(neighbour->first);
      allocator_->free(shared->first);
      live.erase(neighbour);
      live.erase(shared);
      ASSERT_EQ(allocator_->validate().value_or(""), "");
      ASSERT_EQ(joined_hazards(gpu_), "");
    }
    for (const auto& [at, size] : live) free(at);
    disturbed += paths().disturbed;
  }
  EXPECT_GT(disturbed, 20u);
}

// Blocks come and go, some are shared; what every block and every consumer holds is known throughout.
TEST_F(SharingTest, RandomProgramsKeepAllContents) {
  struct Live {
    Bytes size;
    std::uint64_t tag;
    std::vector<DeviceAddr> consumers;  // where the block begins for each
    std::vector<DeviceAddr> imports;
  };
  int uniform = 0;
  int mixed = 0;  // where other shared blocks stood in the way
  std::uint64_t disturbed = 0;
  for (std::uint32_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    start({});
    gpu_.set_lag_us(200);
    std::mt19937 random(seed);
    std::map<DeviceAddr, Live> live;
    Bytes total;
    std::uint64_t next_tag = 1;
    for (int step = 0; step < 600; ++step) {
      gpu_.advance_by(20);
      const auto what = random() % 10;
      if (what < 5 && total < 2_GiB) {
        const Bytes sizes[] = {Bytes{512 + random() % 100000}, Bytes{(1 + random() % 30) << 20},
                               Bytes{(1 + random() % 40) * 1700000},
                               Bytes{(32 + random() % 90) << 20}};
        const Bytes size = block_size(sizes[random() % 4]);
        AllocResult got = try_alloc(size);
        ASSERT_TRUE(got.ok());
        gpu_.launch(main_, {writes({got.address, size}, next_tag)});
        live[got.address] = {size, next_tag++, {}, {}};
        total += size;
      } else if (!live.empty()) {
        auto it = live.begin();
        std::advance(it, random() % live.size());
        Live& block = it->second;
        gpu_.launch(main_, {reads({it->first, block.size}, block.tag)});
        for (const DeviceAddr there : block.consumers) {
          gpu_.launch(main_, {reads({there, block.size}, block.tag)});
        }
        if (what < 8) {
          for (const DeviceAddr there : block.imports) allocator_->close_import(there);
          total -= block.size;
          allocator_->free(it->first);
          live.erase(it);
        } else if (block.consumers.size() < 3) {
          const auto shared = allocator_->share(it->first);
          ASSERT_TRUE(shared.ok()) << shared.error().where;
          (shared.value().is_uniform() ? uniform : mixed) += 1;
          const DeviceAddr there = import(shared.value());
          block.imports.push_back(there);
          block.consumers.push_back(there + (it->first - shared.value().range.begin));
        }
      }
      ASSERT_EQ(allocator_->validate().value_or(""), "");
      ASSERT_EQ(joined_hazards(gpu_), "");
    }
    for (const auto& [address, block] : live) {
      gpu_.launch(main_, {reads({address, block.size}, block.tag)});
      for (const DeviceAddr there : block.consumers) {
        gpu_.launch(main_, {reads({there, block.size}, block.tag)});
      }
    }
    gpu_.complete_all();
    ASSERT_EQ(joined_hazards(gpu_), "");
    for (const auto& [address, block] : live) {
      for (const DeviceAddr there : block.imports) allocator_->close_import(there);
      allocator_->free(address);
    }
    disturbed += paths().disturbed;
  }
  EXPECT_GT(uniform, 300 * mixed);
  RecordProperty("uniform", uniform);
  RecordProperty("mixed", mixed);
  RecordProperty("disturbed", static_cast<int>(disturbed));
}

// Programs like those of tests/gpu/test_sharing.py.
class SharingProgramTest : public SharingTest {
 protected:
  // Blocks of other sizes come and go.
  class Churn {
   public:
    Churn(SharingProgramTest& test, std::uint32_t seed, Bytes limit)
        : test_(test), random_(seed), limit_(limit) {}
    void step() {
      for (std::uint32_t n = 1 + random_() % 4; n > 0; --n) {
        const Bytes size = next_size();
        if (total_ + size >= limit_) continue;
        blocks_.emplace_back(test_.make(size), size);
        total_ += size;
      }
      while (!blocks_.empty() && (total_.n > limit_.n / 2 || random_() % 10 < 4)) {
        auto& gone = blocks_[random_() % blocks_.size()];
        test_.look(gone.first, gone.second);
        total_ -= gone.second;
        test_.free_quietly(gone.first);
        gone = blocks_.back();
        blocks_.pop_back();
      }
      if (random_() % 20 == 0) test_.allocator_->trim({});
    }
    void end() {
      for (const auto& [at, size] : blocks_) {
        test_.look(at, size);
        test_.free_quietly(at);
      }
      blocks_.clear();
    }

   private:
    Bytes next_size() {
      const auto kind = random_() % 10;
      if (kind < 4) return {4 * (1 + random_() % 200'000)};
      constexpr std::uint64_t kWhole[] = {2, 4, 10, 20, 64, 98, 130};
      if (kind < 7) return {kWhole[random_() % 7] << 20};
      return {4 * ((1 << 18) + random_() % (20'709'376))};
    }

    SharingProgramTest& test_;
    std::mt19937 random_;
    const Bytes limit_;
    Bytes total_;
    std::vector<std::pair<DeviceAddr, Bytes>> blocks_;
  };

  // A block with content of its own; look() reads it, as the programs do, beside a block as large.
  DeviceAddr make(Bytes size) {
    const AllocResult got = try_alloc(size);
    EXPECT_TRUE(got.ok());
    gpu_.launch(main_, {writes({got.address, block_size(size)}, got.address.n)});
    return got.address;
  }
  void look(DeviceAddr at, Bytes size) {
    const AllocResult expected = try_alloc(size);
    gpu_.launch(main_, {reads({at, block_size(size)}, at.n)});
    if (expected.ok()) free_quietly(expected.address);
    gpu_.advance_by(20);
  }
  void free_quietly(DeviceAddr at) { allocator_->free(at); }
  void share_and_count(DeviceAddr at, Bytes size) {
    const SharedRange shared = share(at);
    (shared.is_uniform() ? uniform_ : mixed_) += 1;
    handles_ += shared.handles.size();
    const DeviceAddr there = import(shared);
    gpu_.launch(main_, {reads({there + (at - shared.range.begin), block_size(size)}, at.n)});
    allocator_->close_import(there);
  }
  // std::shuffle() is not the same with every library.
  template <class T>
  static void shuffle(std::vector<T>& items, std::mt19937& random) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random() % i]);
  }
  void finish() {
    gpu_.complete_all();
    ASSERT_EQ(joined_hazards(gpu_), "");
    disturbed_ += paths().disturbed;
  }
  void TearDown() override {
    RecordProperty("uniform", uniform_);
    RecordProperty("mixed", mixed_);
    RecordProperty("handles", static_cast<int>(handles_));
    RecordProperty("disturbed", static_cast<int>(disturbed_));
  }

  int uniform_ = 0;
  int mixed_ = 0;
  std::uint64_t handles_ = 0;
  std::uint64_t disturbed_ = 0;
};

TEST_F(SharingProgramTest, BatchesOfAllSizesAreOverHandlesOfOneSize) {
  const std::vector<Bytes> sizes = {4_B,          1000_B, 512_KiB, 1_MiB,  3_MiB + 4_B,
                                    11_MiB + 4_B, 66_MiB, 100_MiB, 514_MiB};
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    start({});
    gpu_.set_lag_us(200);
    std::mt19937 random(seed);
    Churn churn(*this, seed, 1500_MiB);
    for (int round = 0; round < 25; ++round) {
      churn.step();
      std::vector<Bytes> chosen = sizes;
      if (round > 0) {
        chosen.pop_back();
        shuffle(chosen, random);
        chosen.resize(4);
      }
      std::vector<std::pair<DeviceAddr, Bytes>> batch;
      for (const Bytes size : chosen) batch.emplace_back(make(size), size);
      const auto step =
          random() % batch.size();  // the queue's thread shares while the program goes on
      for (std::size_t i = 0; i < batch.size(); ++i) {
        if (i == step) churn.step();
        share_and_count(batch[i].first, batch[i].second);
      }
      for (const auto& [at, size] : batch) {
        look(at, size);
        free_quietly(at);
      }
    }
    churn.end();
    finish();
  }
  EXPECT_EQ(mixed_, 0);
}

TEST_F(SharingProgramTest, NeighboursSharedInAnyOrderAreOverHandlesOfOneSize) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    start({});
    gpu_.set_lag_us(200);
    std::mt19937 random(seed);
    Churn churn(*this, seed, 400_MiB);
    if (seed % 2 == 1) churn.step();
    // Of one heap or of two.
    const std::uint64_t largest = seed % 4 < 2 ? 23 << 18 : 60 << 18;
    std::vector<std::pair<DeviceAddr, Bytes>> blocks;
    for (int i = 0; i < 40; ++i) {
      const Bytes size{4 * ((1 << 18) + random() % largest)};
      blocks.emplace_back(make(size), size);
    }
    shuffle(blocks, random);
    for (const auto& [at, size] : blocks) {
      churn.step();
      share_and_count(at, size);
    }
    churn.end();
    for (const auto& [at, size] : blocks) {
      look(at, size);
      free_quietly(at);
    }
    finish();
  }
  EXPECT_EQ(mixed_, 0);
}

TEST_F(SharingTest, OtherThreadsAllocateAndFreeMeanwhile) {
  gpu_.set_lag_us(50);
  std::atomic<bool> stop{false};
  std::thread churn([&] {
    const StreamInfo mine = new_stream();
    std::mt19937 random(5);
    std::vector<DeviceAddr> held;
    while (!stop) {
      const Bytes size{(1 + random() % 40) * 1000000};
      if (AllocResult got = try_alloc(size, mine); got.ok()) held.push_back(got.address);
      if (held.size() > 10) {
        allocator_->free(held.front());
        held.erase(held.begin());
      }
    }
    for (const DeviceAddr a : held) allocator_->free(a);
  });
  for (int i = 0; i < 50; ++i) {
    AllocResult got = try_alloc(100_MiB + Bytes{static_cast<std::uint64_t>(i) << 21});
    ASSERT_TRUE(got.ok());
    const auto shared = allocator_->share(got.address);
    ASSERT_TRUE(shared.ok());
    allocator_->close_import(import(shared.value()));
    allocator_->free(got.address);
  }
  stop = true;
  churn.join();
}

// --- peers

class PeersTest : public ::testing::Test {
 protected:
  SimMachine machine_{3, device_of(2_GiB)};
  SimDriver& gpu_ = machine_.device(0);
  DeviceAllocator allocator_{gpu_, {}};
  const StreamInfo main_ = permanent(gpu_.default_stream());

  DeviceAddr alloc(Bytes size) {
    return allocator_.allocate({size, main_, kDefaultPool, 0, nullptr}).address;
  }
};

TEST_F(PeersTest, APeerMayUseWhatIsMappedNowAndLater) {
  const DeviceAddr before = alloc(100_MiB);
  EXPECT_FALSE(gpu_.peer_may_use({before, 100_MiB}, 1));
  EXPECT_TRUE(allocator_.add_peer(1).ok());
  EXPECT_TRUE(gpu_.peer_may_use({before, 100_MiB}, 1));
  const DeviceAddr after = alloc(300_MiB);
  EXPECT_TRUE(gpu_.peer_may_use({after, 300_MiB}, 1));
  EXPECT_FALSE(gpu_.peer_may_use({after, 300_MiB}, 2));
  EXPECT_TRUE(allocator_.add_peer(2).ok());
  for (const int peer : {1, 2}) EXPECT_TRUE(gpu_.peer_may_use({after, 300_MiB}, peer));
  // Handles that move to other addresses take it with them.
  allocator_.free(before);
  allocator_.free(after);
  const DeviceAddr moved = alloc(390_MiB + 512_B);
  for (const int peer : {1, 2}) EXPECT_TRUE(gpu_.peer_may_use({moved, 390_MiB + 512_B}, peer));
  allocator_.free(moved);
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(PeersTest, AskedTwiceItDoesNothing) {
  alloc(100_MiB);
  EXPECT_TRUE(allocator_.add_peer(1).ok());
  gpu_.reset_meter();
  EXPECT_TRUE(allocator_.add_peer(1).ok());
  EXPECT_EQ(gpu_.meter().count(DriverCall::kSetAccess), 0u);
}

TEST_F(PeersTest, SharedAndImportedMemoryToo) {
  EXPECT_TRUE(allocator_.add_peer(1).ok());
  const DeviceAddr a = alloc(100_MiB);
  const auto shared = allocator_.share(a);
  ASSERT_TRUE(shared.ok());
  EXPECT_TRUE(gpu_.peer_may_use(shared.value().range, 1));
  std::vector<ForeignHandle> handles;
  for (const SharedHandle& h : shared.value().handles) handles.push_back({h.size, h.descriptor});
  const DeviceAddr there = allocator_.import_memory(handles).value();
  EXPECT_TRUE(gpu_.peer_may_use({there, 100_MiB}, 1));
  EXPECT_TRUE(allocator_.add_peer(2).ok());
  EXPECT_TRUE(gpu_.peer_may_use({there, 100_MiB}, 2));
  allocator_.close_import(there);
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(PeersTest, AFailureIsToldAndTheNextCallMakesUpForIt) {
  const DeviceAddr a = alloc(100_MiB);
  gpu_.fail_nth(DriverCall::kSetAccess, 3);
  EXPECT_EQ(error_of(allocator_.add_peer(1)), Errc::kOutOfMemory);
  EXPECT_FALSE(gpu_.peer_may_use({a, 100_MiB}, 1));
  EXPECT_TRUE(allocator_.add_peer(1).ok());
  EXPECT_TRUE(gpu_.peer_may_use({a, 100_MiB}, 1));
}

// --- blocks at an address, and what is looked up

class AtAddressTest : public AllocatorTest {
 protected:
  AtAddressTest() : AllocatorTest(device_of(4_GiB)) {}
  bool alloc_at(DeviceAddr at, Bytes size, const StreamInfo& stream) {
    const auto got = allocator_->allocate_at({size, stream, kDefaultPool, 0, nullptr}, at);
    EXPECT_EQ(allocator_->validate().value_or(""), "");
    EXPECT_TRUE(!got || (got->ok() && got->address == at));
    return got.has_value();
  }
  bool alloc_at(DeviceAddr at, Bytes size) { return alloc_at(at, size, permanent(main_)); }
};

TEST_F(AtAddressTest, TakesAPartOfWhatIsReady) {
  const DeviceAddr a = alloc(64_MiB);
  EXPECT_FALSE(alloc_at(a, 1_MiB));
  free(a);
  EXPECT_TRUE(alloc_at(a + 1_MiB, 1000_B));
  EXPECT_FALSE(alloc_at(a + 1_MiB, 512_B));
  EXPECT_FALSE(alloc_at(a, 2_MiB));  // over it
  EXPECT_TRUE(alloc_at(a, 1_MiB));
  EXPECT_TRUE(alloc_at(a + 2_MiB, 62_MiB));
  EXPECT_EQ(stats().requested_bytes.all().current, n(63_MiB + 1000_B));
  for (const Bytes at : {0_MiB, 1_MiB, 2_MiB}) free(a + at);
}

TEST_F(AtAddressTest, BringsMemoryToWhereItWent) {
  const DeviceAddr a = alloc(64_MiB);
  free(a);
  allocator_->trim({});
  EXPECT_TRUE(alloc_at(a, 64_MiB));
  gpu_.launch(main_, {writes({a, 64_MiB}, 3)});
  gpu_.launch(main_, {reads({a, 64_MiB}, 3)});
  free(a);
}

TEST_F(AtAddressTest, RefusesWhatIsNotOfThisStreamOrNotOurs) {
  const DeviceAddr a = alloc(64_MiB);
  free(a);
  EXPECT_FALSE(alloc_at(a, 1_MiB, new_stream()));
  EXPECT_FALSE(alloc_at(a + 1_B, 1_MiB));
  EXPECT_FALSE(alloc_at(DeviceAddr{1 << 20}, 1_MiB));
  EXPECT_FALSE(alloc_at(a, 8_TiB));
}

TEST_F(AtAddressTest, FailsWhereTheDeviceIsFull) {
  const DeviceAddr a = alloc(64_MiB);
  free(a);
  allocator_->trim({});
  const DeviceAddr all = alloc(4_GiB);
  EXPECT_FALSE(alloc_at(a, 64_MiB));
  free(all);
}

TEST_F(AtAddressTest, ASegmentIsARunOfMemory) {
  const DeviceAddr a = alloc(64_MiB);
  const DeviceAddr b = alloc(64_MiB);
  EXPECT_EQ(b, a + 64_MiB);
  EXPECT_EQ(allocator_->segment_of(b + 5_MiB), (AddrRange{a, 128_MiB}));
  EXPECT_EQ(allocator_->segment_of(a + 128_MiB), std::nullopt);
  EXPECT_EQ(allocator_->segment_of(DeviceAddr{1 << 20}), std::nullopt);
  const PoolId pool = allocator_->create_pool({.plain = true});
  const DeviceAddr plain = alloc(3_MiB, permanent(main_), pool);
  EXPECT_EQ(allocator_->segment_of(plain + 1_MiB), (AddrRange{plain, 20_MiB}));
  free(plain);
  allocator_->release_pool(pool);
}

TEST_F(AtAddressTest, ABlockTellsWhatItStandsOn) {
  const DeviceAddr a = alloc(100_MiB + 512_B);
  const auto behind = allocator_->memory_behind(a + 7_MiB);
  ASSERT_TRUE(behind);
  EXPECT_EQ(behind->block, (AddrRange{a, 100_MiB + 512_B}));
  EXPECT_FALSE(behind->plain);
  EXPECT_TRUE(behind->exportable);
  ASSERT_GT(behind->handles.size(), 1u);
  EXPECT_LE(behind->handles.front().begin, a);
  EXPECT_GE(behind->handles.back().end(), a + 100_MiB + 512_B);
  for (std::size_t i = 1; i < behind->handles.size(); ++i) {
    EXPECT_EQ(behind->handles[i].begin, behind->handles[i - 1].end());
  }
  // However much comes and goes beside it.
  for (int i = 0; i < 5; ++i) free(alloc_many(40, 33_MiB));
  EXPECT_EQ(allocator_->memory_behind(a)->handles, behind->handles);
  EXPECT_EQ(allocator_->memory_behind(a + 200_MiB), std::nullopt);
  free(a);
  EXPECT_EQ(allocator_->memory_behind(a), std::nullopt);

  const PoolId pool = allocator_->create_pool({.plain = true});
  const DeviceAddr plain = alloc(3_MiB, permanent(main_), pool);
  const auto one = allocator_->memory_behind(plain);
  ASSERT_TRUE(one);
  EXPECT_TRUE(one->plain);
  EXPECT_EQ(one->handles, (std::vector<AddrRange>{{plain, 20_MiB}}));
  free(plain);
  allocator_->release_pool(pool);
}

TEST_F(AtAddressTest, TheLargestCachedIsWhatIdleHandlesMakeUp) {
  EXPECT_EQ(allocator_->largest_cached(), 0_B);
  const std::vector<DeviceAddr> blocks = alloc_many(4, 64_MiB);
  EXPECT_EQ(allocator_->largest_cached(), 0_B);
  free(blocks[0]);
  free(blocks[2]);
  EXPECT_EQ(allocator_->largest_cached(), 128_MiB);
  gpu_.complete_all();
  free(alloc(128_MiB));
  EXPECT_EQ(reserved(), 256_MiB);
  free(blocks[1]);
  free(blocks[3]);
}

}  // namespace
}  // namespace gpumemx
