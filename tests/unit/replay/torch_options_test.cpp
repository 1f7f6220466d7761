// SPDX-License-Identifier: BSD-3-Clause
#include "replay/torch_options.hpp"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace gpumemx {
namespace {

TorchOptions with(std::string_view key, std::string_view value) {
  TorchOptions options;
  EXPECT_EQ(options.set(key, value), std::nullopt);
  return options;
}

TEST(TorchOptions, RoundSizesAsTheirDivisionsSay) {
  EXPECT_EQ(TorchOptions{}.rounded(1_B), 512_B);
  EXPECT_EQ(TorchOptions{}.rounded(513_B), 1024_B);
  const TorchOptions all = with("roundup_power2_divisions", "4");
  EXPECT_EQ(all.rounded(1200_MiB), 1280_MiB);
  EXPECT_EQ(all.rounded(1024_MiB), 1024_MiB);
  EXPECT_EQ(all.rounded(2000_B), 2048_B);  // up to 512 B a division: as without
  const TorchOptions some = with("roundup_power2_divisions", "[256:1,512:2,1024:4,>:8]");
  EXPECT_EQ(some.rounded(300_MiB), 300_MiB);
  EXPECT_EQ(some.rounded(600_MiB), 768_MiB);
  EXPECT_EQ(some.rounded(1100_MiB), 1280_MiB);
  EXPECT_EQ(some.rounded(2100_MiB), 2304_MiB);
  EXPECT_EQ(some.rounded(3_MiB + 1_B), 3_MiB + 512_B);
}

TEST(TorchOptions, RefuseWhatTorchRefuses) {
  TorchOptions options;
  for (const auto& [key, value] : std::vector<std::pair<const char*, const char*>>{
           {"max_split_size_mb", "64MiB"},
           {"max_split_size_mb", ""},
           {"max_split_size_mb", "-1"},
           {"large_segment_size_mb", "10"},
           {"garbage_collection_threshold", "0"},
           {"garbage_collection_threshold", "nan"},
           {"expandable_segments", "1"},
           {"roundup_power2_divisions", "3"},
           {"roundup_power2_divisions", "[256:1,,>:2]"},
           {"roundup_power2_divisions", "[100:1]"},
           {"roundup_power2_divisions", "[256:3]"},
           {"roundup_power2_divisions", "[256:1"},
           {"backend", "native"}}) {
    EXPECT_TRUE(options.set(key, value).has_value()) << key << ":" << value;
  }
  EXPECT_EQ(with("max_split_size_mb", "19").validate(),
            "max_split_size_mb must not be below large_segment_size_mb, which is 20");
  EXPECT_EQ(with("large_segment_size_mb", "33").validate(), std::nullopt);
}

}  // namespace
}  // namespace gpumemx
