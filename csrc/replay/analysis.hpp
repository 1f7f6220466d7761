// SPDX-License-Identifier: BSD-3-Clause
//
// What a snapshot answers: when live memory was highest and what it was, how much of what was
// reserved could not be used, and what an out-of-memory event in it meant. Bytes everywhere are those
// that the program asked for, but for reserved, which is the device's memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "replay/layout.hpp"
#include "replay/recorded_run.hpp"

namespace gpumemx {

struct AliveGroup {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
};

struct SeriesPoint {
  std::int64_t time_us = 0;  // since 1970; where times were not recorded, the number of the event
  std::uint64_t live = 0;    // the highest of the point's span, as is reserved
  std::optional<std::uint64_t> reserved;
};

struct OomEvent {
  std::int64_t event = 0;
  std::uint64_t requested = 0;
  std::optional<std::uint64_t> device_free;
  std::uint64_t live = 0;
  std::optional<std::uint64_t> reserved;
  std::string meaning;
};

struct Lonely {
  AddrRange segment;
  std::string held_by;  // a site
  std::uint64_t bytes = 0;
};

struct DeviceAnalysis {
  int device = 0;
  std::uint64_t events = 0;
  Recording state = Recording::kOff;
  bool overflowed = false;
  std::uint64_t baseline_bytes = 0;
  std::uint64_t unknown_frees = 0;
  std::uint64_t live_now = 0;
  std::optional<std::uint64_t> reserved_now;

  // The first event after which the most was live; -1: before the first event.
  std::int64_t peak_event = -1;
  std::optional<std::int64_t> peak_time_us;
  std::uint64_t peak_live = 0;
  std::optional<std::uint64_t> peak_reserved;  // at that event
  std::vector<AliveGroup> by_site;             // these three: the most bytes first
  std::vector<AliveGroup> by_size_class;       // by size
  std::vector<AliveGroup> by_category;

  Layout at_peak;
  std::vector<Lonely> lonely;  // of the layout
  std::vector<OomEvent> ooms;
  std::vector<SeriesPoint> series;  // at most kMaxPoints

  static constexpr std::size_t kMaxPoints = 4000;
};

struct Analysis {
  std::string schema;
  std::vector<DeviceAnalysis> devices;
};

// Fails: kInvalidArgument, when the snapshot says nothing of any device or contradicts itself.
Result<Analysis> analyze(const Snapshot& snapshot);

}  // namespace gpumemx
