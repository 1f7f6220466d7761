// SPDX-License-Identifier: BSD-3-Clause
#include "replay/torch_options.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <vector>

namespace gpumemx {

namespace {

constexpr Bytes kGranule = 512_B;
constexpr unsigned kFirstInterval = 20;  // log2 of 1 MiB
constexpr std::uint64_t kMostMiB = std::uint64_t{1} << 43;

template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string refused(std::string_view key, std::string_view value, std::string_view accepted) {
  return "'" + std::string(value) + "' is no value for " + std::string(key) + ", which takes " +
         std::string(accepted);
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == text.npos) return parts;
    text.remove_prefix(end + 1);
  }
}

using Divisions = std::array<std::uint64_t, TorchOptions::kIntervals>;

// "4", or "[256:1,512:2,>:4]": up to the first interval as it, then each alone, '>' for all after
// the last one named.
std::optional<Divisions> divisions(std::string_view text) {
  Divisions result{};
  if (!text.starts_with('[')) {
    const auto all = number<std::uint64_t>(text);
    if (!all || !std::has_single_bit(*all)) return std::nullopt;
    result.fill(*all);
    return result;
  }
  if (!text.ends_with(']')) return std::nullopt;
  std::optional<std::size_t> last;
  for (const std::string_view item : split(text.substr(1, text.size() - 2), ',')) {
    const std::size_t colon = item.find(':');
    if (colon == item.npos) return std::nullopt;
    const auto value = number<std::uint64_t>(item.substr(colon + 1));
    if (!value || (*value != 0 && !std::has_single_bit(*value))) return std::nullopt;
    if (item.substr(0, colon) == ">") {
      const std::size_t from = std::min(last.value_or(0) + 1, result.size());
      std::fill(result.begin() + static_cast<std::ptrdiff_t>(from), result.end(), *value);
      continue;
    }
    const auto mib = number<std::uint64_t>(item.substr(0, colon));
    if (!mib || !std::has_single_bit(*mib)) return std::nullopt;
    const std::size_t index =
        std::min(static_cast<std::size_t>(std::countr_zero(*mib)), result.size() - 1);
    if (!last)
      std::fill(result.begin(), result.begin() + static_cast<std::ptrdiff_t>(index), *value);
    result[index] = *value;
    last = index;
  }
  return result;
}

constexpr std::array<std::string_view, 6> kKeys{
    "expandable_segments",   "garbage_collection_threshold",
    "large_segment_size_mb", "max_non_split_rounding_mb",
    "max_split_size_mb",     "roundup_power2_divisions"};

}  // namespace

std::span<const std::string_view> TorchOptions::keys() { return kKeys; }

std::optional<std::string> TorchOptions::set(std::string_view key, std::string_view value) {
  const auto mib = [&](Bytes& field, std::uint64_t least) -> std::optional<std::string> {
    const auto size = number<std::uint64_t>(value);
    if (!size || *size < least || *size >= kMostMiB) {
      return refused(
          key, value,
          "a whole number of MiB, " + std::to_string(least) + " or more, without a unit");
    }
    field = 1_MiB * *size;
    return std::nullopt;
  };
  if (key == "max_split_size_mb") return mib(max_split_size, 1);
  if (key == "max_non_split_rounding_mb") return mib(max_non_split_rounding, 1);
  if (key == "large_segment_size_mb") return mib(large_segment_size, 11);
  if (key == "garbage_collection_threshold") {
    const auto share = number<double>(value);
    if (!share || !(*share > 0 && *share < 1)) {
      return refused(key, value, "a number above 0 and below 1");
    }
    garbage_collection_threshold = *share;
    return std::nullopt;
  }
  if (key == "expandable_segments") {
    if (value != "true" && value != "false") return refused(key, value, "true or false");
    expandable_segments = value == "true";
    return std::nullopt;
  }
  if (key == "roundup_power2_divisions") {
    const auto parsed = divisions(value);
    if (!parsed) {
      return refused(key, value,
                     "a power of two, or a list of MiB and powers of two such as "
                     "[256:1,512:2,>:4]");
    }
    roundup_power2_divisions = *parsed;
    return std::nullopt;
  }
  return "there is no setting '" + std::string(key) + "'";
}

std::optional<std::string> TorchOptions::validate() const {
  // torch compares what is given, not the default of the second.
  const bool rounding_given = max_non_split_rounding != TorchOptions{}.max_non_split_rounding;
  const char* below = nullptr;
  if (max_split_size < large_segment_size) below = "max_split_size_mb";
  if (rounding_given && max_non_split_rounding < large_segment_size) {
    below = "max_non_split_rounding_mb";
  }
  if (below != nullptr) {
    return std::string(below) + " must not be below large_segment_size_mb, which is " +
           std::to_string(large_segment_size.n >> 20);
  }
  if (expandable_segments && large_segment_size.n % (2_MiB).n != 0) {
    return "large_segment_size_mb must be even with expandable segments: it is their page, and a "
           "device maps no less than 2 MiB";
  }
  return std::nullopt;
}

Bytes TorchOptions::rounded(Bytes size) const {
  if (size < kGranule) return kGranule;
  const auto log2 = static_cast<unsigned>(std::bit_width(size.n) - 1);
  const std::size_t interval =
      std::min<std::size_t>(log2 > kFirstInterval ? log2 - kFirstInterval : 0, kIntervals - 1);
  const std::uint64_t parts = roundup_power2_divisions[interval];
  if (parts <= 1 || size <= kGranule * parts) return round_up(size, kGranule);
  return round_up(size, {std::bit_floor(size.n) / parts});
}

}  // namespace gpumemx
