// SPDX-License-Identifier: BSD-3-Clause
//
// One failed request explained to the end: the verdict of the core, who set the cap, which lines of the
// program hold most, and what would help under the settings in force.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/oom.hpp"

namespace gpumemx {

// Live memory by the line of the program that asked for it.
struct OomHolder {
  std::string site;  // "file:line function"
  Bytes bytes;
  std::uint64_t blocks = 0;
};
inline constexpr std::size_t kOomHolders = 5;

struct OomReport {
  std::string id;  // is in the text of the error too: the one leads to the other
  int device = 0;
  OomVerdict verdict;
  std::string cap_source;          // who set the cap, in words; empty: nobody
  bool is_plain = false;           // mode:plain
  std::vector<OomHolder> holders;  // largest first, kOomHolders at most; empty without a history

  // One sentence about what would have helped, or empty where nothing is known to. Never proposes
  // what is in force already.
  std::string advice() const;
  // All of it: the cause's name, the verdict's text, the cap's source, holders, advice, the id.
  std::string text() const;
};

}  // namespace gpumemx
