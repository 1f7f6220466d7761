// SPDX-License-Identifier: BSD-3-Clause
//
// The rules of torch's allocator one by one, on a few requests each. That they add up to the figures
// of whole runs is tested from Python, against what a card measured.
#include "replay/torch_model.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

namespace gpumemx {
namespace {

// Segments taken and given back, in MiB with its sign: "+20 +2 -20".
class Torch {
 public:
  explicit Torch(const TorchOptions& options = {}, const MemoryLimits& limits = {})
      : model_(options, limits) {
    EXPECT_EQ(options.validate(), std::nullopt);
    model_.observe_segments([this](const SegmentEvent& e) {
      if (!log_.empty()) log_ += " ";
      log_ += (e.taken ? "+" : "-") + std::to_string(e.range.size.n >> 20);
    });
  }

  BlockRef get(Bytes size, std::int16_t stream = 0) {
    const auto block = model_.allocate(size, stream);
    EXPECT_TRUE(block.has_value());
    return block.value_or(0);
  }
  bool refused(Bytes size, std::int16_t stream = 0) {
    return !model_.allocate(size, stream).has_value();
  }
  void put(BlockRef block) { model_.free(block); }
  std::string log() { return std::exchange(log_, {}); }
  PolicyFigures figures() const { return model_.figures(); }

 private:
  std::string log_;
  TorchModel model_;
};

TorchOptions with(std::string_view key, std::string_view value) {
  TorchOptions options;
  EXPECT_EQ(options.set(key, value), std::nullopt);
  return options;
}

TorchOptions expandable() { return with("expandable_segments", "true"); }

MemoryLimits cap(Bytes size) { return {.cap = size, .device = {}, .device_total = {}}; }
MemoryLimits device(Bytes size) { return {.cap = {}, .device = size, .device_total = {}}; }

TEST(TorchModel, TakesSegmentsByTheSizeOfTheRequest) {
  Torch torch;
  torch.get(1_B);
  torch.get(1_MiB);  // in the rest of the same
  EXPECT_EQ(torch.log(), "+2");
  torch.get(1_MiB + 1_B);
  torch.get(9_MiB);
  torch.get(9_MiB);
  EXPECT_EQ(torch.log(), "+20");
  torch.get(10_MiB);
  torch.get(11_MiB + 1_B);
  EXPECT_EQ(torch.log(), "+10 +12");
}

TEST(TorchModel, HoldsNothingForNothing) {
  Torch torch;
  const BlockRef none = torch.get(0_B);
  torch.put(none);
  EXPECT_EQ(torch.log(), "");
  EXPECT_EQ(torch.figures().reserved, Bytes{});
}

TEST(TorchModel, KeepsALargeRestOfUpToAMebibyteWithItsBlock) {
  Torch torch;
  torch.get(31_MiB);  // of 32
  torch.get(1_MiB + 1_B);
  EXPECT_EQ(torch.log(), "+32 +20");
  Torch cut;
  cut.get(31_MiB - 512_B);
  cut.get(1_MiB + 1_B);
  EXPECT_EQ(cut.log(), "+32");
}

TEST(TorchModel, TakesTheSmallestBlockThatFitsAndOfEqualOnesTheLowest) {
  Torch torch;
  const BlockRef large = torch.get(64_MiB);
  const BlockRef small = torch.get(40_MiB);
  const BlockRef twin = torch.get(40_MiB);  // below the one before
  torch.put(large);
  torch.put(small);
  torch.put(twin);
  EXPECT_EQ(torch.log(), "+64 +40 +40");
  EXPECT_EQ(torch.get(40_MiB), twin);
  EXPECT_EQ(torch.get(40_MiB), small);
  torch.get(40_MiB);  // cuts the 64
  torch.get(24_MiB);
  EXPECT_EQ(torch.log(), "");
}

TEST(TorchModel, ServesAStreamOnlyWithItsOwnBlocks) {
  Torch torch;
  torch.put(torch.get(32_MiB, 0));
  torch.get(32_MiB, 1);
  EXPECT_EQ(torch.log(), "+32 +32");
}

TEST(TorchModel, MergesNeighboursWithinASegment) {
  Torch torch;
  const BlockRef a = torch.get(8_MiB), b = torch.get(8_MiB), c = torch.get(4_MiB);
  torch.put(a);
  torch.put(c);
  torch.put(b);
  EXPECT_EQ(torch.log(), "+20");
  torch.get(20_MiB);
  EXPECT_EQ(torch.log(), "");
}

TEST(TorchModel, GivesWholeSegmentsBackBeforeItFails) {
  Torch torch({}, cap(100_MiB));
  torch.put(torch.get(40_MiB));
  const BlockRef cut = torch.get(30_MiB);
  torch.get(4_MiB);
  EXPECT_EQ(torch.log(), "+40");  // all of them cut from one
  torch.put(cut);
  torch.put(torch.get(40_MiB, 1));
  torch.get(60_MiB, 2);  // the 40 of stream 1 is whole, that of stream 0 is not
  EXPECT_EQ(torch.log(), "+40 -40 +60");
  EXPECT_EQ(torch.figures().retries, 1u);
  EXPECT_TRUE(torch.refused(32_MiB, 1));
  EXPECT_EQ(torch.figures().reserved, 100_MiB);
}

TEST(TorchModel, FailsAtOnceAtARequestThatNoDeviceHolds) {
  Torch torch;
  EXPECT_TRUE(torch.refused({std::uint64_t{1} << 62}));
  EXPECT_TRUE(torch.refused({INT64_MAX}));
}

TEST(TorchModel, NeitherCutsNorSharesWhatIsOversize) {
  Torch torch(with("max_split_size_mb", "32"));
  const BlockRef large = torch.get(64_MiB);
  torch.put(large);
  torch.get(24_MiB);  // not from it
  EXPECT_EQ(torch.log(), "+64 +24");
  EXPECT_EQ(torch.get(45_MiB), large);  // 19 MiB more than asked for
  torch.put(large);
  torch.get(44_MiB);  // 20 would be too much
  EXPECT_EQ(torch.log(), "+44");
}

TEST(TorchModel, GivesOversizeBlocksBackFirst) {
  Torch torch(with("max_split_size_mb", "32"), cap(150_MiB));
  torch.put(torch.get(24_MiB));
  torch.put(torch.get(80_MiB));
  torch.put(torch.get(40_MiB));
  EXPECT_EQ(torch.log(), "+24 +80 +40");
  torch.get(50_MiB);  // 80 would be 30 too much; it goes, being the smallest above 50
  EXPECT_EQ(torch.log(), "-80 +50");
  EXPECT_EQ(torch.figures().retries, 0u);
}

TEST(TorchModel, CollectsWhatWasCachedLongest) {
  Torch torch(with("garbage_collection_threshold", "0.5"), cap(200_MiB));
  torch.put(torch.get(60_MiB));
  const BlockRef used = torch.get(70_MiB);
  torch.put(torch.get(40_MiB, 1));
  EXPECT_EQ(torch.log(), "+60 +70 -60 +40");  // 130 of 200 was more than half
  torch.put(used);
}

TEST(TorchModel, GivesLargeSegmentsTheSizeThatIsSet) {
  Torch torch(with("large_segment_size_mb", "64"));
  torch.get(2_MiB);
  torch.get(10_MiB);
  EXPECT_EQ(torch.log(), "+64");
}

TEST(TorchModel, GrowsOneSegmentPageByPage) {
  Torch torch(expandable());
  torch.get(4_MiB);
  torch.get(30_MiB);  // 16 are there: 20 more
  EXPECT_EQ(torch.log(), "+20 +20");
  torch.get(512_B);
  EXPECT_EQ(torch.log(), "+2");
  torch.get(4_MiB, 1);
  EXPECT_EQ(torch.log(), "+20");
  EXPECT_EQ(torch.figures().reserved, 62_MiB);
}

TEST(TorchModel, UnmapsWholePagesInFreeBlocksAndMapsThemAgain) {
  Torch torch(expandable(), cap(120_MiB));
  const BlockRef a = torch.get(50_MiB);
  torch.get(10_MiB);
  EXPECT_EQ(torch.log(), "+60");
  torch.put(a);
  torch.get(70_MiB);  // 40 of the 50 go, then 80 come at the end
  EXPECT_EQ(torch.log(), "-40 +80");
  EXPECT_EQ(torch.figures().reserved, 100_MiB);
  torch.get(19_MiB);  // the lowest place: 40 unmapped and the 10 that stayed
  EXPECT_EQ(torch.log(), "+20");
}

TEST(TorchModel, NeedsRoomForTheWholeRequestUnderACapAndOnADeviceOnlyForItsPages) {
  Torch capped(expandable(), cap(40_MiB));
  capped.get(15_MiB);
  EXPECT_TRUE(capped.refused(24_MiB));  // 5 are there, yet 20 + 24 is above the cap
  Torch whole(expandable(), device(40_MiB));
  whole.get(15_MiB);
  whole.get(24_MiB);
  EXPECT_EQ(whole.log(), "+20 +20");
  EXPECT_TRUE(whole.refused(2_MiB));
}

TEST(TorchModel, StartsAnotherSegmentWhereTheAddressesOfOneAreUsedUp) {
  Torch torch(expandable(), {.cap = {}, .device = {}, .device_total = 80_MiB});
  torch.get(30_MiB);
  torch.get(25_MiB);
  EXPECT_EQ(torch.log(), "+40 +20");  // of 100, 9/8 of the device in whole pages
  torch.get(50_MiB);
  EXPECT_EQ(torch.log(), "+60");
  torch.get(45_MiB);  // 5 and 40 of the first
  EXPECT_EQ(torch.log(), "+40");
}

// Random requests of three streams under a cap: what is held is the sum of the segments and never above
// the cap by more than torch's own rounding, and with nothing in use all of it goes back.
void run_at_random(const TorchOptions& options, Bytes over, std::uint32_t seed) {
  constexpr Bytes kCap = 400_MiB;
  TorchModel model(options, cap(kCap));
  std::int64_t held = 0;
  model.observe_segments([&](const SegmentEvent& e) {
    const auto size = static_cast<std::int64_t>(e.range.size.n);
    held += e.taken ? size : -size;
  });
  std::mt19937 random(seed);
  std::vector<BlockRef> live;
  for (int i = 0; i < 4000; ++i) {
    if (!live.empty() && random() % 2 == 0) {
      std::swap(live[random() % live.size()], live.back());
      model.free(live.back());
      live.pop_back();
    } else {
      const Bytes size{1 + random() % (std::uint64_t{1} << (random() % 27))};
      if (const auto block = model.allocate(size, static_cast<std::int16_t>(random() % 3))) {
        live.push_back(*block);
      }
    }
    ASSERT_EQ(static_cast<std::int64_t>(model.figures().reserved.n), held);
    ASSERT_LT(model.figures().reserved, kCap + over);
  }
  for (const BlockRef block : live) model.free(block);
  EXPECT_FALSE(model.allocate(kCap + 1_B, 0).has_value());
  EXPECT_EQ(held, 0);
}

TEST(TorchModel, AddsUpAndGivesAllBackWhateverIsAskedOfIt) {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    run_at_random({}, 1_B, seed);
    run_at_random(with("max_split_size_mb", "20"), 1_B, seed);
    run_at_random(with("garbage_collection_threshold", "0.8"), 1_B, seed);
    run_at_random(expandable(), 20_MiB, seed);
  }
}

}  // namespace
}  // namespace gpumemx
