// SPDX-License-Identifier: BSD-3-Clause
#include "base/text.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace gpumemx {

std::string format_bytes(Bytes size) {
  static constexpr std::array<const char*, 5> kUnits{"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (size.n < 1024) return std::to_string(size.n) + " B";
  double value = static_cast<double>(size.n) / 1024;
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.2f %s", value, kUnits[unit]);
  return text.data();
}

std::optional<Bytes> parse_bytes(std::string_view text) {
  std::string clean;
  for (const char c : text) {
    if (c == ' ' || c == '\t') continue;
    clean += static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  }
  double number = 0;
  const char* const end = clean.data() + clean.size();
  const auto parsed = std::from_chars(clean.data(), end, number, std::chars_format::fixed);
  if (parsed.ec != std::errc() || !(number >= 0)) return std::nullopt;
  std::string_view unit(parsed.ptr, static_cast<std::size_t>(end - parsed.ptr));
  int shift = 0;
  if (!unit.empty() && unit != "b") {
    const auto at = std::string_view("kmgtp").find(unit.front());
    if (at == std::string_view::npos) return std::nullopt;
    shift = 10 * (static_cast<int>(at) + 1);
    unit.remove_prefix(1);
    if (!unit.empty() && unit != "b" && unit != "ib") return std::nullopt;
  }
  const double bytes = std::floor(std::ldexp(number, shift));
  if (!(bytes < std::ldexp(1.0, 63))) return std::nullopt;
  return Bytes{static_cast<std::uint64_t>(bytes)};
}

}  // namespace gpumemx
