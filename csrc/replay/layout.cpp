// SPDX-License-Identifier: BSD-3-Clause
#include "replay/layout.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>

namespace gpumemx {

namespace {

constexpr Bytes kBlockStep = 512_B;
constexpr std::uint64_t kLonelyShare = 8;

// Device memory by address. Pieces of expandable segments merge, other segments never do.
class Segments {
 public:
  struct Segment {
    std::uint64_t size = 0;
    bool expandable = false;
    bool private_pool = false;
  };
  using Map = std::map<std::uint64_t, Segment>;

  void add(std::uint64_t address, const Segment& segment) { map_[address] = segment; }
  void remove(std::uint64_t address) { map_.erase(address); }

  void map(std::uint64_t address, std::uint64_t size) {
    unmap(address, size);
    auto place = map_.emplace(address, Segment{size, true, false}).first;
    if (place != map_.begin()) {
      const auto before = std::prev(place);
      if (before->second.expandable && before->first + before->second.size == address) {
        before->second.size += size;
        map_.erase(place);
        place = before;
      }
    }
    const auto after = std::next(place);
    if (after != map_.end() && after->second.expandable &&
        place->first + place->second.size == after->first) {
      place->second.size += after->second.size;
      map_.erase(after);
    }
  }

  void unmap(std::uint64_t address, std::uint64_t size) {
    const std::uint64_t end = address + size;
    auto at = map_.upper_bound(address);
    if (at != map_.begin()) --at;
    while (at != map_.end() && at->first < end) {
      const std::uint64_t first = at->first, last = first + at->second.size;
      if (!at->second.expandable || last <= address) {
        ++at;
        continue;
      }
      Segment rest = at->second;
      at = map_.erase(at);
      if (first < address) {
        rest.size = address - first;
        map_.emplace(first, rest);
      }
      if (last > end) {
        rest.size = last - end;
        at = map_.emplace(end, rest).first;
      }
    }
  }

  const Map& all() const { return map_; }

 private:
  Map map_;
};

Segments segments_at(const Snapshot& snapshot, const RecordedRun& run, std::int64_t event) {
  Segments segments;
  for (const SnapshotSegment& s : snapshot.segments) {
    if (s.device != run.device) continue;
    segments.add(s.address, {s.size, s.expandable, s.private_pool});
  }
  const SnapshotEntries& e = snapshot.entries;
  for (auto i = static_cast<std::int64_t>(run.entries.count) - 1; i > event; --i) {
    const std::size_t row = run.entries.first + static_cast<std::size_t>(i);
    switch (e.action[row]) {
      case TraceAction::kSegmentAlloc: segments.remove(e.addr[row]); break;
      case TraceAction::kSegmentFree: segments.add(e.addr[row], {e.size[row], false, false}); break;
      case TraceAction::kSegmentMap: segments.unmap(e.addr[row], e.size[row]); break;
      case TraceAction::kSegmentUnmap: segments.map(e.addr[row], e.size[row]); break;
      default: break;
    }
  }
  return segments;
}

struct Used {
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
  std::int32_t block = RecordedBlock::kNone;  // kNone: its free is not completed
};

// What is in use after the event, by address; adds up the live bytes.
std::vector<Used> used_at(const Snapshot& snapshot, const RecordedRun& run, std::int64_t event,
                          std::uint64_t& live) {
  const SnapshotEntries& e = snapshot.entries;
  std::vector<bool> is_live(run.blocks.size());
  for (const std::int32_t number : run.baseline) is_live[static_cast<std::size_t>(number)] = true;
  std::unordered_map<std::uint64_t, std::uint64_t> pending;  // sizes by address
  const auto begin = e.action.begin() + static_cast<std::ptrdiff_t>(run.entries.first);
  const bool completes = std::find(begin, begin + static_cast<std::ptrdiff_t>(run.entries.count),
                                   TraceAction::kFreeCompleted) !=
                         begin + static_cast<std::ptrdiff_t>(run.entries.count);
  for (std::int64_t i = 0; i <= event; ++i) {
    const std::size_t row = run.entries.first + static_cast<std::size_t>(i);
    const std::int32_t change = run.change[static_cast<std::size_t>(i)];
    if (change > 0) {
      const auto number = static_cast<std::size_t>(change - 1);
      const std::int32_t replaced = run.blocks[number].replaces;
      if (replaced != RecordedBlock::kNone) is_live[static_cast<std::size_t>(replaced)] = false;
      is_live[number] = true;
      pending.erase(e.addr[row]);
    } else if (change < 0) {
      is_live[static_cast<std::size_t>(-change - 1)] = false;
      if (completes && e.action[row] == TraceAction::kFreeRequested) {
        pending[e.addr[row]] = e.size[row];
      }
    } else if (e.action[row] == TraceAction::kFreeCompleted) {
      pending.erase(e.addr[row]);
    }
  }
  const auto rounded = [](std::uint64_t size) {
    return round_up({std::max<std::uint64_t>(size, 1)}, kBlockStep).n;
  };
  std::vector<Used> used;
  for (std::size_t i = 0; i < is_live.size(); ++i) {
    if (!is_live[i]) continue;
    live += run.blocks[i].size;
    used.push_back(
        {run.blocks[i].address, rounded(run.blocks[i].size), static_cast<std::int32_t>(i)});
  }
  for (const auto& [address, size] : pending) {
    used.push_back({address, rounded(size), RecordedBlock::kNone});
  }
  std::sort(used.begin(), used.end(),
            [](const Used& a, const Used& b) { return a.begin < b.begin; });
  return used;
}

}  // namespace

Layout layout_at(const Snapshot& snapshot, const RecordedRun& run, std::int64_t event) {
  Layout layout;
  if (!run.reserved_before) return layout;
  const Segments segments = segments_at(snapshot, run, event);
  const std::vector<Used> used = used_at(snapshot, run, event, layout.live);

  auto next = used.begin();
  for (const auto& [begin, segment] : segments.all()) {
    const std::uint64_t end = begin + segment.size;
    layout.reserved += segment.size;
    while (next != used.end() && next->begin < begin) ++next;
    const auto first = next;
    std::uint64_t at = begin, free = 0;
    const auto gap = [&](std::uint64_t to) {
      if (to <= at) return;
      free += to - at;
      layout.largest_free = std::max(layout.largest_free, to - at);
    };
    for (; next != used.end() && next->begin < end; ++next) {
      gap(next->begin);
      at = std::max(at, std::min(end, next->begin + next->size));
    }
    gap(end);
    if (segment.private_pool) layout.free_in_private_pools += free;
    if (next == first) continue;  // empty: empty_cache() gives it back
    layout.free_in_busy_segments += free;
    if (next - first == 1 && first->block != RecordedBlock::kNone &&
        first->size <= segment.size / kLonelyShare) {
      layout.lonely.push_back({{{begin}, {segment.size}}, first->block});
    }
  }
  const auto waste = [&](const LonelySegment& s) {
    return s.range.size.n - run.blocks[static_cast<std::size_t>(s.block)].size;
  };
  std::stable_sort(
      layout.lonely.begin(), layout.lonely.end(),
      [&](const LonelySegment& a, const LonelySegment& b) { return waste(a) > waste(b); });
  return layout;
}

}  // namespace gpumemx
