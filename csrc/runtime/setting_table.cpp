// SPDX-License-Identifier: BSD-3-Clause
#include "runtime/setting_table.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <type_traits>

#include "base/text.hpp"
#include "core/size_classes.hpp"

namespace gpumemx {
namespace {

constexpr double as_number(Bytes size) { return static_cast<double>(size.n); }

constexpr Bytes kNone{~0ull};
constexpr std::array<std::string_view, 2> kNoWords{};

constexpr SettingRange kAny{};  // 0 or more; of a bool: nothing to say
constexpr SettingRange kPageOrMore{as_number(kPage)};
constexpr SettingRange kGranuleOrMore{as_number(kGranule)};
constexpr SettingRange kUpToHandle{0, as_number(kMaxHandle)};
constexpr SettingRange kHandle{as_number(kPage), as_number(kMaxHandle), false, true};
constexpr SettingRange kShare{0, 1};
constexpr SettingRange kShareAboveZero{0, 1, true};
constexpr SettingRange kCount{1, 1'000'000};

using O = Options;

constexpr std::array kRows{
    SettingRow{"cap", &O::cap, kPageOrMore, "Memory that this process may reserve on a device",
               kNoWords, true},
    SettingRow{
        "mode",
        &O::plain,
        kAny,
        "How memory is got: pages mapped where they are needed, or ordinary device allocations",
        {"virtual", "plain"}},
    SettingRow{"pool_mode",
               &O::plain_pools,
               kAny,
               "The same for private pools (CUDA graphs, MemPool): plain ones can be shared with "
               "cudaIpcGetMemHandle() and registered",
               {"virtual", "plain"}},
    SettingRow{"background", &O::background, kAny,
               "Whether a thread unmaps and releases memory, so that requests need not"},
    SettingRow{
        "slack", &O::slack, kShare,
        "Growth over the peak of live memory, as a share of it, that goes before idle memory is "
        "moved"},
    SettingRow{"cushion", &O::cushion, kShare,
               "The same for small programs: memory that spares them driver calls"},
    SettingRow{"cushion_until", &O::cushion_until, kAny,
               "Peak of live memory from which on there is no cushion"},
    SettingRow{"max_aliases", &O::max_aliases, kCount,
               "Addresses at which one handle (a piece of device memory) stays mapped"},
    SettingRow{"hit_waste", &O::hit_waste, kAny,
               "Idle memory beyond the block's own that a ready place may make busy"},
    SettingRow{"hit_scan", &O::hit_scan, kCount, "Ready places that are looked at for a request"},
    SettingRow{"price", &O::price, kAny, "MiB of waste that mapping one handle is worth"},
    SettingRow{"price_pages", &O::price_pages, kAny,
               "The price for big blocks and for multiples of 2 MiB, in MiB"},
    SettingRow{"overhang", &O::overhang, kUpToHandle,
               "How far a used handle may stand out over the gap that it fills"},
    SettingRow{
        "tight_from", &O::tight_from, kShareAboveZero,
        "Share of the capacity that, once reserved, makes memory worth more than driver time"},
    SettingRow{"tight_price", &O::tight_price, kAny,
               "Highest price and price_pages from tight_from on, in MiB"},
    SettingRow{"tight_handle", &O::tight_handle, kHandle, "Largest new handle from tight_from on"},
    SettingRow{"fence_frees", &O::fence_frees, kCount,
               "Frees on one stream after which an event is recorded"},
    SettingRow{"fence_bytes", &O::fence_bytes, kGranuleOrMore,
               "Memory freed on one stream after which an event is recorded"},
    SettingRow{"max_fences", &O::max_fences, kCount, "Events in flight on one stream"},
    SettingRow{"small_handle", &O::small_handle, kHandle, "New handles for small blocks"},
    SettingRow{"rest_handle", &O::rest_handle, kHandle,
               "Smallest new handle for blocks that are neither small, big nor multiples of 2 MiB"},
    SettingRow{"rest_handle_max", &O::rest_handle_max, kHandle, "Largest new handle for the same"},
    SettingRow{"big_handle", &O::big_handle, kHandle,
               "Smallest new handle for big blocks and for multiples of 2 MiB"},
    SettingRow{"big_handle_max", &O::big_handle_max, kHandle, "Largest new handle for the same"},
};

std::string number_text(double number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

// Exact, and readable by parse_bytes(): "8MiB", "1536KiB".
std::string size_text(Bytes size) {
  static constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  std::uint64_t n = size.n;
  std::size_t unit = 0;
  while (n != 0 && n % 1024 == 0 && unit + 1 < kUnits.size()) {
    n /= 1024;
    ++unit;
  }
  return std::to_string(n) + kUnits[unit];
}

bool is_size(const SettingRow& row) { return std::holds_alternative<Bytes Options::*>(row.field); }

std::string limit_text(const SettingRow& row, double limit) {
  if (is_size(row)) return size_text({static_cast<std::uint64_t>(limit)});
  if (std::holds_alternative<double Options::*>(row.field)) return number_text(limit);
  return std::to_string(static_cast<std::int64_t>(limit));
}

bool in_range(const SettingRange& range, double value) {
  if (!std::isfinite(value) || value < range.least || value > range.most) return false;
  return !(range.above_least && value == range.least);
}

template <class Value>
std::optional<Value> read(const SettingRow& row, std::string_view word) {
  if constexpr (std::is_same_v<Value, Bytes>) {
    if (row.none && word == "none") return kNone;
    const std::optional<Bytes> size = parse_bytes(word);
    if (!size || !in_range(row.range, as_number(*size))) return std::nullopt;
    if (row.range.power_of_two && !std::has_single_bit(size->n)) return std::nullopt;
    return size;
  } else if constexpr (std::is_same_v<Value, bool>) {
    if (!row.words[0].empty()) {
      if (word != row.words[0] && word != row.words[1]) return std::nullopt;
      return word == row.words[1];
    }
    for (const std::string_view yes : {"true", "1", "on", "yes"}) {
      if (word == yes) return true;
    }
    for (const std::string_view no : {"false", "0", "off", "no"}) {
      if (word == no) return false;
    }
    return std::nullopt;
  } else {
    Value value{};
    const auto parsed = std::from_chars(word.data(), word.data() + word.size(), value);
    if (parsed.ec != std::errc() || parsed.ptr != word.data() + word.size()) return std::nullopt;
    if (!in_range(row.range, static_cast<double>(value))) return std::nullopt;
    return value;
  }
}

}  // namespace

std::span<const SettingRow> setting_rows() { return kRows; }

std::optional<std::size_t> find_setting(std::string_view name) {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].name == name) return i;
  }
  return std::nullopt;
}

const char* type_name(const SettingRow& row) {
  static constexpr std::array kNames{"bytes", "int", "int", "float", "bool"};
  return row.words[0].empty() ? kNames[row.field.index()] : "choice";
}

std::string accepted_values(const SettingRow& row) {
  if (std::holds_alternative<bool Options::*>(row.field)) {
    if (row.words[0].empty()) return "true or false";
    return std::string(row.words[0]) + " or " + std::string(row.words[1]);
  }
  const std::string least = limit_text(row, row.range.least);
  std::string text = "a whole number";
  if (std::holds_alternative<double Options::*>(row.field)) text = "a number";
  if (is_size(row)) text = row.range.power_of_two ? "a power of two" : "a size";
  if (std::isinf(row.range.most)) {
    if (is_size(row)) text += " such as 512MiB";
    text += ", " + least + " or more";
  } else if (row.range.above_least) {
    text += " above " + least + " and at most " + limit_text(row, row.range.most);
  } else {
    text += " from " + least + " to " + limit_text(row, row.range.most);
  }
  return row.none ? text + ", or none" : text;
}

std::string value_text(const SettingRow& row, const Options& options) {
  return std::visit(
      [&](auto field) -> std::string {
        const auto value = options.*field;
        using Value = std::remove_const_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, Bytes>) {
          return row.none && value == kNone ? "none" : size_text(value);
        } else if constexpr (std::is_same_v<Value, bool>) {
          if (!row.words[0].empty()) return std::string(row.words[value ? 1 : 0]);
          return value ? "true" : "false";
        } else if constexpr (std::is_same_v<Value, double>) {
          return number_text(value);
        } else {
          return std::to_string(value);
        }
      },
      row.field);
}

std::string plain_word(std::string_view text) {
  std::string word;
  for (const char c : text) {
    if (is_space(c)) continue;
    word += static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  }
  return word;
}

bool set_value(const SettingRow& row, std::string_view text, Options& options) {
  return std::visit(
      [&](auto field) {
        using Value = std::remove_reference_t<decltype(options.*field)>;
        const std::optional<Value> value = read<Value>(row, plain_word(text));
        if (value) options.*field = *value;
        return value.has_value();
      },
      row.field);
}

}  // namespace gpumemx
