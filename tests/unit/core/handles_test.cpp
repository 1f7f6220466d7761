// SPDX-License-Identifier: BSD-3-Clause
//
// Handles that move, and the aliases that they leave behind.
#include <gtest/gtest.h>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

class HandlesTest : public AllocatorTest {
 protected:
  HandlesTest() : AllocatorTest(device_of(16_GiB)) {}
  // 64 MiB in one heap, then in another, by turns: without slack the same memory has to move.
  static constexpr Bytes kPagesBlock = 64_MiB;          // the heap of whole pages
  static constexpr Bytes kBigBlock = 64_MiB - 512_KiB;  // the heap of big blocks
  const StreamInfo b_ = new_stream();
};

TEST_F(HandlesTest, IdleMemoryMovesToWhereItIsNeededInsteadOfGrowing) {
  free(alloc(kPagesBlock));
  alloc(kBigBlock);
  EXPECT_EQ(reserved(), 64_MiB);
  EXPECT_EQ(paths().harvested_own, 4u);  // four handles of 16 MiB
  EXPECT_EQ(paths().created, 4u);
  EXPECT_EQ(stats().dormant_aliases, 4u);
  EXPECT_EQ(gpu_.mapping_count(), 8u);
}

TEST_F(HandlesTest, WorkThatIsQueuedAtTheOldAddressStillFindsItsMemory) {
  gpu_.set_manual(true);
  const DeviceAddr old_place = alloc(kPagesBlock);
  gpu_.launch(main_, {writes({old_place, kPagesBlock}, 1)});
  gpu_.launch(main_, {reads({old_place, kPagesBlock}, 1)});
  free(old_place);
  const DeviceAddr new_place = alloc(kBigBlock);
  EXPECT_NE(new_place, old_place);
  EXPECT_EQ(reserved(), 64_MiB);
  gpu_.launch(main_, {writes({new_place, kBigBlock}, 2)});
  gpu_.launch(main_, {reads({new_place, kBigBlock}, 2)});
  gpu_.complete_all();  // hazards, if any, are looked at in the end
  gpu_.set_manual(false);
}

TEST_F(HandlesTest, MemoryDoesNotMoveToAnotherStreamBeforeItsWorkIsComplete) {
  gpu_.set_manual(true);
  const DeviceAddr place = alloc(kPagesBlock);
  gpu_.launch(main_, {writes({place, kPagesBlock}, 1)});
  free(place);
  alloc(kPagesBlock, b_);
  EXPECT_EQ(reserved(), 128_MiB);
  gpu_.complete_all();
  free(alloc(kBigBlock, b_));
  EXPECT_EQ(reserved(), 128_MiB);
  EXPECT_EQ(paths().harvested_other, 4u);
  gpu_.set_manual(false);
}

TEST_F(HandlesTest, AnAddressThatIsStillMappedIsUsedAgainWithoutADriverCall) {
  const DeviceAddr first = alloc(kPagesBlock);
  free(first);
  free(alloc(kBigBlock));
  gpu_.reset_meter();
  EXPECT_EQ(alloc(kPagesBlock), first);
  EXPECT_EQ(mapping_calls(), 0u);
  EXPECT_EQ(paths().alias_switches, 4u);
  EXPECT_EQ(stats().dormant_aliases, 4u);
}

TEST_F(HandlesTest, SwitchingBackAndForthStaysWithoutDriverCalls) {
  free(alloc(kPagesBlock));
  free(alloc(kBigBlock));
  gpu_.reset_meter();
  for (int i = 0; i < 50; ++i) {
    free(alloc(kPagesBlock));
    free(alloc(kBigBlock));
  }
  EXPECT_EQ(mapping_calls(), 0u);
  EXPECT_EQ(reserved(), 64_MiB);
}

TEST_F(HandlesTest, AHandleKeepsNoMoreAliasesThanAllowed) {
  for (const int most : {1, 3}) {
    Options options;
    options.max_aliases = most;
    start(options);
    std::vector<StreamInfo> streams;
    for (int i = 0; i < 6; ++i) streams.push_back(new_stream());
    for (const StreamInfo& s : streams) {
      free(alloc(8_MiB, s));
      EXPECT_LE(gpu_.mapping_count(), static_cast<std::uint64_t>(most));
    }
    EXPECT_EQ(gpu_.handle_count(), 1u);
    EXPECT_EQ(gpu_.mapping_count(), static_cast<std::uint64_t>(most));
    EXPECT_EQ(paths().aliases_dropped, static_cast<std::uint64_t>(6 - most));
  }
}

TEST_F(HandlesTest, AnAliasWhoseWorkRunsIsKeptBeyondTheLimit) {
  Options options;
  options.max_aliases = 1;
  start(options);
  gpu_.set_manual(true);
  const DeviceAddr place = alloc(kPagesBlock);
  gpu_.launch(main_, {writes({place, kPagesBlock}, 1)});
  free(place);
  alloc(kBigBlock);
  EXPECT_EQ(gpu_.mapping_count(), 8u);  // unmapping the old ones would be a hazard
  gpu_.complete_all();
  gpu_.set_manual(false);
}

TEST_F(HandlesTest, InTheBackgroundSurplusAliasesWaitForMaintain) {
  Options options;
  options.max_aliases = 1;
  options.background = true;
  start(options);
  free(alloc(kPagesBlock));
  free(alloc(kBigBlock));
  EXPECT_EQ(gpu_.mapping_count(), 8u);
  for (std::uint64_t left = 7; left >= 4; --left) {  // one driver call each
    EXPECT_TRUE(allocator_->maintain());
    EXPECT_EQ(gpu_.mapping_count(), left);
  }
  EXPECT_EQ(stats().dormant_aliases, 0u);
  EXPECT_EQ(paths().aliases_dropped, 4u);
  EXPECT_FALSE(allocator_->maintain());
}

TEST_F(HandlesTest, NearTheDriversLimitCompleteAliasesAreDropped) {
  Options options;
  options.max_mappings = 6;
  start(options);
  free(alloc(kPagesBlock));
  free(alloc(kBigBlock));
  EXPECT_EQ(gpu_.mapping_count(), 8u);
  free(alloc(8_MiB, b_));  // a miss with more than six
  EXPECT_EQ(paths().aliases_dropped, 4u);
  EXPECT_LE(gpu_.mapping_count(), 6u);
}

TEST_F(HandlesTest, AnIdleHandleOfTheWrongSizeIsReplacedByAPieceOfTheRightOne) {
  free(alloc(kPagesBlock));  // handles of 16 MiB
  alloc(1_MiB);              // wants 2 MiB, where there is no budget left
  EXPECT_EQ(paths().recut, 1u);
  EXPECT_EQ(reserved(), 50_MiB);
  EXPECT_EQ(calls(DriverCall::kRelease), 1u);
}

TEST_F(HandlesTest, WithoutRecutAHandleThatIsTooLargeServesBeforeTheHeapGrows) {
  Options options;
  options.recut = false;
  start(options);
  free(alloc(kPagesBlock));
  alloc(1_MiB);
  EXPECT_EQ(paths().recut, 0u);
  EXPECT_EQ(paths().harvested_own, 1u);
  EXPECT_EQ(reserved(), 64_MiB);
}

TEST_F(HandlesTest, InTheBackgroundAReplacedHandleIsReleasedByMaintain) {
  Options options;
  options.background = true;
  start(options);
  free(alloc(kPagesBlock));
  alloc(1_MiB);
  EXPECT_EQ(reserved(), 66_MiB);
  EXPECT_EQ(calls(DriverCall::kRelease), 0u);
  EXPECT_TRUE(allocator_->maintain());  // unmaps it
  EXPECT_EQ(reserved(), 66_MiB);
  EXPECT_TRUE(allocator_->maintain());
  EXPECT_EQ(reserved(), 50_MiB);
  EXPECT_EQ(calls(DriverCall::kRelease), 1u);
  EXPECT_FALSE(allocator_->maintain());
}

// As in a replay of `lora_rlhf` that leaves the background no time: 1.45 x of what was live.
TEST_F(HandlesTest, WhereMaintainDoesNotGetToWorkReplacedHandlesDoNotPileUp) {
  Options options;
  options.background = true;
  options.cushion = 0;
  start(options);
  for (int i = 0; i < 4; ++i) free(alloc(kPagesBlock));  // four handles of 16 MiB
  std::vector<DeviceAddr> small;
  Bytes most;
  for (int i = 0; i < 24; ++i) {  // each wants a handle of 2 MiB of its own in turn
    small.push_back(alloc(1_MiB));
    small.push_back(alloc(1_MiB));
    most = std::max(most, reserved());
  }
  EXPECT_GE(paths().recut, 2u);
  EXPECT_LE(most, 64_MiB + 24_MiB + 2_MiB);
  EXPECT_GE(calls(DriverCall::kRelease), 1u);  // in line
}

TEST_F(HandlesTest, WhereMaintainDoesNotGetToWorkAliasesDoNotPileUpEither) {
  Options options;
  options.background = true;
  options.max_aliases = 1;
  start(options);
  for (int i = 0; i < 5; ++i) {
    free(alloc(kPagesBlock));
    free(alloc(kBigBlock + 2_MiB * i));
  }
  EXPECT_LE(gpu_.mapping_count(), 2 * gpu_.handle_count());
}

TEST_F(HandlesTest, AReplacedHandleThatCannotBeUnmappedIsKept) {
  Options options;
  options.background = true;
  start(options);
  free(alloc(kPagesBlock));
  alloc(1_MiB);
  gpu_.fail_nth(DriverCall::kUnmap, 1);
  EXPECT_TRUE(allocator_->maintain());
  EXPECT_FALSE(allocator_->maintain());
  EXPECT_EQ(reserved(), 66_MiB);
  alloc(8_MiB);  // it serves like any other
  EXPECT_EQ(reserved(), 66_MiB);
}

TEST_F(HandlesTest, ARequestDoesNotFailForWhatOnlyWaitsForMaintain) {
  Options options;
  options.background = true;
  options.cap = 66_MiB;
  start(options);
  free(alloc(kPagesBlock));
  alloc(1_MiB);
  ASSERT_EQ(reserved(), 66_MiB);
  alloc(63_MiB);  // 48 MiB are idle; 16 MiB more are only there once the replaced handle is gone
  EXPECT_LE(reserved(), 66_MiB);
}

TEST_F(HandlesTest, TrimReleasesWhatWaitsForMaintainToo) {
  Options options;
  options.background = true;
  start(options);
  free(alloc(kPagesBlock));
  const DeviceAddr small = alloc(1_MiB);
  const TrimReport report = allocator_->trim({});
  EXPECT_EQ(report.released, 64_MiB);
  EXPECT_EQ(reserved(), 2_MiB);
  free(small);
}

TEST_F(HandlesTest, AHandleThatTheDriverDoesNotUnmapStaysInTheBooks) {
  free(alloc(kPagesBlock));
  gpu_.fail_always(DriverCall::kUnmap);
  EXPECT_EQ(allocator_->trim({}).released, 0_B);
  EXPECT_EQ(allocator_->validate().value_or(""), "");
  EXPECT_EQ(reserved(), 64_MiB);
  gpu_.clear_failures();
  EXPECT_EQ(allocator_->trim({}).released, 64_MiB);
}

TEST_F(HandlesTest, AHandleThatTheDriverDoesNotReleaseStaysInTheBooks) {
  free(alloc(8_MiB));
  gpu_.fail_nth(DriverCall::kRelease, 1);
  EXPECT_EQ(allocator_->trim({}).released, 0_B);
  EXPECT_EQ(allocator_->validate().value_or(""), "");
  alloc(8_MiB);  // it can be used again
  EXPECT_EQ(reserved(), 8_MiB);
  EXPECT_EQ(paths().harvested_loose, 1u);
}

}  // namespace
}  // namespace gpumemx
