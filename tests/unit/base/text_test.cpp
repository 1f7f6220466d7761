// SPDX-License-Identifier: BSD-3-Clause
#include "base/text.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(FormatBytes, HasNoDecimalsBelowOneKiBAndTwoFromThere) {
  EXPECT_EQ(format_bytes(0_B), "0 B");
  EXPECT_EQ(format_bytes(1023_B), "1023 B");
  EXPECT_EQ(format_bytes(1_KiB), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536_B), "1.50 KiB");
  EXPECT_EQ(format_bytes(1536_MiB), "1.50 GiB");
  EXPECT_EQ(format_bytes(2_TiB), "2.00 TiB");
}

TEST(FormatBytes, StaysInPiBAboveThem) {
  EXPECT_EQ(format_bytes(4096_TiB), "4.00 PiB");
  EXPECT_EQ(format_bytes({1ull << 63}), "8192.00 PiB");
}

struct Row {
  const char* text;
  std::optional<Bytes> size;
};

class ParseBytes : public ::testing::TestWithParam<Row> {};

TEST_P(ParseBytes, GivesTheSizeOrNothing) {
  EXPECT_EQ(parse_bytes(GetParam().text), GetParam().size) << '"' << GetParam().text << '"';
}

INSTANTIATE_TEST_SUITE_P(Plain, ParseBytes,
                         ::testing::Values(Row{"0", 0_B}, Row{"1000000", {{1000000}}},
                                           Row{"17b", 17_B}, Row{"17 B", 17_B}, Row{"0.9", 0_B},
                                           Row{"1.5", 1_B}));
INSTANTIATE_TEST_SUITE_P(Units, ParseBytes,
                         ::testing::Values(Row{"24GiB", 24_GiB}, Row{"24G", 24_GiB},
                                           Row{"24gb", 24_GiB}, Row{"1k", 1_KiB},
                                           Row{"1KiB", 1_KiB}, Row{"512MiB", 512_MiB},
                                           Row{"512mb", 512_MiB}, Row{"2T", 2_TiB},
                                           Row{"1PiB", 1024_TiB}));
INSTANTIATE_TEST_SUITE_P(SpacesAndCase, ParseBytes,
                         ::testing::Values(Row{" 1.5 GiB ", 1536_MiB}, Row{"1.5\tgIb", 1536_MiB},
                                           Row{"0.5 K", 512_B}, Row{".5k", 512_B}));
INSTANTIATE_TEST_SUITE_P(NotASize, ParseBytes,
                         ::testing::Values(Row{"", std::nullopt}, Row{" ", std::nullopt},
                                           Row{"GiB", std::nullopt}, Row{"b", std::nullopt},
                                           Row{"-1", std::nullopt}, Row{"-1GiB", std::nullopt},
                                           Row{"+1", std::nullopt}, Row{"1,5G", std::nullopt},
                                           Row{"1e9", std::nullopt}, Row{"0x10", std::nullopt},
                                           Row{"1.2.3", std::nullopt}, Row{"1GiBs", std::nullopt},
                                           Row{"1 XB", std::nullopt}, Row{"1bG", std::nullopt},
                                           Row{"1iB", std::nullopt}, Row{"nan", std::nullopt},
                                           Row{"inf", std::nullopt}, Row{"1\n", std::nullopt},
                                           Row{"twelve", std::nullopt}));
INSTANTIATE_TEST_SUITE_P(Overflow, ParseBytes,
                         ::testing::Values(Row{"8191PiB", {{8191ull << 50}}},
                                           Row{"8192PiB", std::nullopt},
                                           Row{"9223372036854775808", std::nullopt},
                                           Row{"99999999T", std::nullopt},
                                           Row{"1000000000000000000000000000000", std::nullopt}));

}  // namespace
}  // namespace gpumemx
