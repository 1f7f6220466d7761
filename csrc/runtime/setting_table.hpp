// SPDX-License-Identifier: BSD-3-Clause
//
// One row a setting: its name, the field of Options behind it, its limits and its meaning. How a
// value is written and read follows from the field's type, and the default is the field's own, so
// neither stands here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "core/options.hpp"

namespace gpumemx {

struct SettingRange {
  double least = 0;
  double most = std::numeric_limits<double>::infinity();
  bool above_least = false;   // `least` itself is refused
  bool power_of_two = false;  // of bytes
};

struct SettingRow {
  using Field = std::variant<Bytes Options::*, int Options::*, std::uint32_t Options::*,
                             double Options::*, bool Options::*>;

  std::string_view name;
  Field field;
  SettingRange range;                       // of one value; Options::validate() judges combinations
  std::string_view meaning;                 // without what is accepted
  std::array<std::string_view, 2> words{};  // of a choice: for false, for true
  bool none = false;                        // "none" is a value: no limit
};

std::span<const SettingRow> setting_rows();
// The row's index. `name` in lower case.
std::optional<std::size_t> find_setting(std::string_view name);

const char* type_name(const SettingRow& row);        // bytes, int, float, bool or choice
std::string accepted_values(const SettingRow& row);  // "a number from 0 to 1"
std::string value_text(const SettingRow& row,
                       const Options& options);  // exact; set_value() reads it
// False, and nothing is written, when the text is no value for the setting.
bool set_value(const SettingRow& row, std::string_view text, Options& options);

constexpr bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
// Without white space, in lower case.
std::string plain_word(std::string_view text);

}  // namespace gpumemx
