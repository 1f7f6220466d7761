// SPDX-License-Identifier: BSD-3-Clause
//
// Pickles for tests, written opcode by opcode: each function gives the bytes that push one value.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replay/snapshot.hpp"

namespace gpumemx::pickles {

inline std::string little(std::uint64_t n, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(n >> (8 * i));
  return out;
}

inline std::string num(std::int64_t n) {
  return "\x8a\x08" + little(static_cast<std::uint64_t>(n), 8);
}
inline std::string text(const std::string& s) { return "X" + little(s.size(), 4) + s; }
inline std::string none() { return "N"; }
inline std::string boolean(bool b) { return b ? "\x88" : "\x89"; }

inline std::string joined(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += item;
  return out;
}
inline std::string list(const std::vector<std::string>& items) {
  return "](" + joined(items) + "e";
}
inline std::string tuple(const std::vector<std::string>& items) {
  return "(" + joined(items) + "t";
}

using Items = std::vector<std::pair<std::string, std::string>>;
inline std::string dict(const Items& items) {
  std::string out = "}(";
  for (const auto& [key, value] : items) out += text(key) + value;
  return out + "u";
}

inline std::string whole(const std::string& value) { return "\x80\x04" + value + "."; }

// --- what a snapshot is made of

inline std::string frame(const std::string& file, int line, const std::string& name) {
  return dict({{"filename", text(file)}, {"line", num(line)}, {"name", text(name)}});
}

struct Entry {
  std::string action;
  std::int64_t addr = 0;
  std::int64_t size = 0;
  std::int64_t time_us = 0;
  std::int64_t stream = 0;
  std::vector<std::string> frames{};

  std::string bytes() const {
    Items items{{"action", text(action)},
                {action == "oom" ? "device_free" : "addr", num(addr)},
                {"size", num(size)},
                {"stream", num(stream)},
                {"time_us", num(time_us)}};
    if (!frames.empty()) items.push_back({"frames", list(frames)});
    return dict(items);
  }
};

struct Block {
  std::int64_t address = 0;
  std::int64_t size = 0;
  std::int64_t requested = 0;
  std::string state = "active_allocated";
  std::vector<std::string> frames{};

  std::string bytes() const {
    return dict({{"address", num(address)},
                 {"size", num(size)},
                 {"requested_size", num(requested)},
                 {"state", text(state)},
                 {"frames", list(frames)}});
  }
};

struct Segment {
  std::int64_t address = 0;
  std::int64_t size = 0;
  std::vector<Block> blocks{};
  std::int64_t device = 0;
  bool expandable = false;
  std::int64_t pool = 0;

  std::string bytes() const {
    std::vector<std::string> inner;
    for (const Block& block : blocks) inner.push_back(block.bytes());
    return dict({{"device", num(device)},
                 {"address", num(address)},
                 {"total_size", num(size)},
                 {"stream", num(0)},
                 {"segment_type", text("large")},
                 {"segment_pool_id", tuple({num(0), num(pool)})},
                 {"is_expandable", boolean(expandable)},
                 {"blocks", list(inner)}});
  }
};

inline std::string snapshot(const std::vector<Segment>& segments,
                            const std::vector<std::vector<Entry>>& devices) {
  std::vector<std::string> all_segments, traces;
  for (const Segment& segment : segments) all_segments.push_back(segment.bytes());
  for (const auto& entries : devices) {
    std::vector<std::string> trace;
    for (const Entry& entry : entries) trace.push_back(entry.bytes());
    traces.push_back(list(trace));
  }
  return whole(dict({{"segments", list(all_segments)}, {"device_traces", list(traces)}}));
}

inline Result<Snapshot> read(const std::string& bytes) {
  PickleInput input(std::as_bytes(std::span(bytes)));
  return read_snapshot(input);
}
// The error of reading it, or "none".
inline std::string mistake(const std::string& bytes) {
  const auto result = read(bytes);
  return result.ok() ? "none" : result.error().where;
}

}  // namespace gpumemx::pickles
