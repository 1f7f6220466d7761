// SPDX-License-Identifier: BSD-3-Clause
#include "replay/analysis.hpp"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "base/text.hpp"
#include "replay/sites.hpp"

namespace gpumemx {

namespace {

// An event of a run with the figures after it.
struct Moment {
  std::int64_t event = -1;
  std::uint64_t live = 0;
  std::optional<std::uint64_t> reserved;
};

// Goes through a run: visit(moment) after each event, and before the first.
template <class Visit>
void walk(const Snapshot& snapshot, const RecordedRun& run, Visit visit) {
  const SnapshotEntries& e = snapshot.entries;
  Moment now{-1, run.baseline_bytes, run.reserved_before};
  const auto size = [&](std::int32_t number) {
    return run.blocks[static_cast<std::size_t>(number)].size;
  };
  visit(now);
  for (std::size_t i = 0; i < run.entries.count; ++i) {
    const std::size_t row = run.entries.first + i;
    const std::int32_t change = run.change[i];
    if (change > 0) {
      const std::int32_t replaced = run.blocks[static_cast<std::size_t>(change - 1)].replaces;
      if (replaced != RecordedBlock::kNone) now.live -= size(replaced);
      now.live += size(change - 1);
    } else if (change < 0) {
      now.live -= size(-change - 1);
    } else if (now.reserved) {
      switch (e.action[row]) {
        case TraceAction::kSegmentAlloc:
        case TraceAction::kSegmentMap: *now.reserved += e.size[row]; break;
        case TraceAction::kSegmentFree:
        case TraceAction::kSegmentUnmap: *now.reserved -= e.size[row]; break;
        default: break;
      }
    }
    now.event = static_cast<std::int64_t>(i);
    visit(now);
  }
}

// Blocks that the native allocator treats alike are in one class up to 1 MiB and from 1 to 10 MiB;
// the classes below and above only make the list readable.
struct SizeClass {
  const char* name;
  std::uint64_t most;
};
constexpr std::array<SizeClass, 9> kSizeClasses = {{
    {"up to 512 B", 512},
    {"512 B to 64 KiB", 64u << 10},
    {"64 KiB to 1 MiB", 1u << 20},
    {"1 MiB to 10 MiB", 10u << 20},
    {"10 MiB to 64 MiB", 64u << 20},
    {"64 MiB to 256 MiB", 256u << 20},
    {"256 MiB to 1 GiB", 1u << 30},
    {"1 GiB to 4 GiB", std::uint64_t{4} << 30},
    {"above 4 GiB", UINT64_MAX},
}};

std::string written(std::uint64_t size) { return format_bytes({size}); }

class DeviceAnalyzer {
 public:
  DeviceAnalyzer(const Snapshot& snapshot, const RecordedRun& run)
      : snapshot_(snapshot), run_(run), sites_(snapshot, run) {}

  DeviceAnalysis analyze() {
    copy_figures();
    find_peak();
    group_alive();
    out_.at_peak = layout_at(snapshot_, run_, out_.peak_event);
    for (const LonelySegment& s : out_.at_peak.lonely) {
      const RecordedBlock& block = run_.blocks[static_cast<std::size_t>(s.block)];
      out_.lonely.push_back({s.range, sites_.site(block), block.size});
    }
    explain_ooms();
    make_series();
    return std::move(out_);
  }

 private:
  void copy_figures() {
    out_.device = run_.device;
    out_.events = run_.entries.count;
    out_.state = run_.state;
    out_.overflowed = run_.overflowed;
    out_.baseline_bytes = run_.baseline_bytes;
    out_.unknown_frees = run_.unknown_frees;
    out_.live_now = run_.live_now;
    out_.reserved_now = run_.reserved_now;
  }

  void find_peak() {
    out_.peak_live = run_.baseline_bytes;
    out_.peak_reserved = run_.reserved_before;
    walk(snapshot_, run_, [&](const Moment& now) {
      if (now.live <= out_.peak_live) return;
      out_.peak_event = now.event;
      out_.peak_live = now.live;
      out_.peak_reserved = now.reserved;
    });
    if (out_.peak_event >= 0) out_.peak_time_us = recorded_time(out_.peak_event);
  }

  std::optional<std::int64_t> recorded_time(std::int64_t event) const {
    const std::int64_t time =
        snapshot_.entries.time_us[run_.entries.first + static_cast<std::size_t>(event)];
    return time < 0 ? std::nullopt : std::optional(time);
  }

  void group_alive() {
    std::vector<bool> alive(run_.blocks.size());
    for (const std::int32_t number : run_.baseline) alive[static_cast<std::size_t>(number)] = true;
    for (std::int64_t i = 0; i <= out_.peak_event; ++i) {
      const std::int32_t change = run_.change[static_cast<std::size_t>(i)];
      if (change > 0) {
        const auto number = static_cast<std::size_t>(change - 1);
        if (const std::int32_t replaced = run_.blocks[number].replaces;
            replaced != RecordedBlock::kNone) {
          alive[static_cast<std::size_t>(replaced)] = false;
        }
        alive[number] = true;
      } else if (change < 0) {
        alive[static_cast<std::size_t>(-change - 1)] = false;
      }
    }

    std::unordered_map<std::string, AliveGroup> sites;
    std::array<AliveGroup, kSizeClasses.size()> classes;
    std::array<AliveGroup, kCategories> categories;
    for (std::size_t i = 0; i < kSizeClasses.size(); ++i) classes[i].name = kSizeClasses[i].name;
    for (std::size_t i = 0; i < kCategories; ++i) {
      categories[i].name = to_string(static_cast<Category>(i));
    }
    const auto count = [](AliveGroup& group, const RecordedBlock& block) {
      group.bytes += block.size;
      ++group.count;
    };
    for (std::size_t i = 0; i < alive.size(); ++i) {
      if (!alive[i]) continue;
      const RecordedBlock& block = run_.blocks[i];
      count(sites[sites_.site(block)], block);
      const auto size_class =
          std::find_if(kSizeClasses.begin(), kSizeClasses.end(),
                       [&](const SizeClass& c) { return block.size <= c.most; });
      count(classes[static_cast<std::size_t>(size_class - kSizeClasses.begin())], block);
      count(categories[static_cast<std::size_t>(sites_.category(block))], block);
    }
    for (auto& [name, group] : sites) {
      group.name = name;
      out_.by_site.push_back(std::move(group));
    }
    for (AliveGroup& group : classes) {
      if (group.count > 0) out_.by_size_class.push_back(std::move(group));
    }
    for (AliveGroup& group : categories) {
      if (group.count > 0) out_.by_category.push_back(std::move(group));
    }
    const auto more = [](const AliveGroup& a, const AliveGroup& b) {
      return a.bytes != b.bytes ? a.bytes > b.bytes : a.name < b.name;
    };
    std::sort(out_.by_site.begin(), out_.by_site.end(), more);
    std::sort(out_.by_category.begin(), out_.by_category.end(), more);
  }

  void explain_ooms() {
    // A program that tries again and again can have thousands, and each look at the layout goes
    // through the whole run.
    constexpr std::size_t kMaxLayouts = 16;
    const SnapshotEntries& e = snapshot_.entries;
    walk(snapshot_, run_, [&](const Moment& now) {
      if (now.event < 0) return;
      const std::size_t row = run_.entries.first + static_cast<std::size_t>(now.event);
      if (e.action[row] != TraceAction::kOom) return;
      OomEvent oom;
      oom.event = now.event;
      oom.requested = e.size[row];
      if (e.addr[row] != SnapshotEntries::kNoNumber) oom.device_free = e.addr[row];
      oom.live = now.live;
      oom.reserved = now.reserved;
      std::optional<Layout> layout;
      if (out_.ooms.size() < kMaxLayouts && now.reserved) {
        layout = layout_at(snapshot_, run_, now.event);
      }
      oom.meaning = meaning(oom, layout);
      out_.ooms.push_back(std::move(oom));
    });
  }

  // Which of the reasons for which native gives up it was.
  static std::string meaning(const OomEvent& oom, const std::optional<Layout>& layout) {
    const std::string asked = written(oom.requested);
    if (oom.device_free && *oom.device_free >= oom.requested) {
      return "The device had " + written(*oom.device_free) + " free, enough for " + asked +
             ": a limit refused it (set_per_process_memory_fraction), or the driver did.";
    }
    const std::string device = oom.device_free
                                   ? "the device had " + written(*oom.device_free) + " left"
                                   : std::string("the device had less than that left");
    if (!oom.reserved) return "No free block held " + asked + " and " + device + ".";
    const std::uint64_t reserved = *oom.reserved;
    const std::uint64_t free = reserved > oom.live ? reserved - oom.live : 0;
    if (free >= oom.requested) {
      std::string text = "Fragmentation: " + written(free) + " of " + written(reserved) +
                         " reserved was free, enough for " + asked + ", but in pieces";
      if (layout) {
        text += ", the largest of " + written(layout->largest_free);
        if (layout->free_in_private_pools > 0) {
          text += "; " + written(layout->free_in_private_pools) +
                  " of it belongs to private pools, which serve only their own";
        }
      }
      return text + "; " + device +
             ". The memory was there: an allocator that can move free memory "
             "together would have served it.";
    }
    if (oom.device_free && free + *oom.device_free >= oom.requested) {
      return "Fragmentation: " + written(free) + " free in " + written(reserved) +
             " reserved and " + written(*oom.device_free) + " left on the device are enough for " +
             asked + " only together.";
    }
    std::string text = "Too much was live: " + written(oom.live) + " of " + written(reserved) +
                       " reserved, and " + device + ". ";
    if (oom.device_free) {
      text += "Even without fragmentation " + asked + " lacked " +
              written(oom.requested - free - *oom.device_free) + ".";
    } else {
      text += asked + " did not fit.";
    }
    return text;
  }

  // One point an event if that is few enough, else one for each of equal spans of time.
  void make_series() {
    const SnapshotEntries& e = snapshot_.entries;
    const std::size_t count = run_.entries.count;
    if (count == 0) return;
    std::int64_t first = 0, last = static_cast<std::int64_t>(count) - 1;
    if (run_.has_times) {
      first = Snapshot::kMaxTime;
      last = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t time = e.time_us[run_.entries.first + i];
        if (time < 0) continue;
        first = std::min(first, time);
        last = std::max(last, time);
      }
    }
    const auto most = static_cast<std::int64_t>(DeviceAnalysis::kMaxPoints);
    const std::int64_t span = (last - first) / most + 1;
    const bool each = count < DeviceAnalysis::kMaxPoints;

    Moment held{-1, run_.baseline_bytes, run_.reserved_before};
    std::int64_t now = first;
    const auto highest = [](SeriesPoint& point, const Moment& m) {
      point.live = std::max(point.live, m.live);
      if (m.reserved) point.reserved = std::max(point.reserved.value_or(0), *m.reserved);
    };
    const auto point_at = [&](std::int64_t time) {
      return SeriesPoint{time, held.live, held.reserved};
    };
    out_.series.push_back(point_at(first));
    walk(snapshot_, run_, [&](const Moment& m) {
      if (m.event < 0) return;
      const auto i = static_cast<std::size_t>(m.event);
      const std::int64_t recorded = run_.has_times ? e.time_us[run_.entries.first + i] : m.event;
      now = std::max(now, recorded);
      if (each) {
        out_.series.push_back({now, m.live, m.reserved});
      } else {
        // A span begins with what stood at the end of the one before it.
        while (out_.series.back().time_us + span <= now) {
          out_.series.push_back(point_at(out_.series.back().time_us + span));
        }
        highest(out_.series.back(), m);
      }
      held = m;
    });
  }

  const Snapshot& snapshot_;
  const RecordedRun& run_;
  Sites sites_;
  DeviceAnalysis out_;
};

}  // namespace

Result<Analysis> analyze(const Snapshot& snapshot) {
  auto runs = recorded_runs(snapshot);
  if (!runs.ok()) return runs.error();
  if (runs.value().empty()) {
    return Error{
        Errc::kInvalidArgument,
        {},
        "the snapshot is empty: no segments and no history; take it while the program holds "
        "device memory, after torch.cuda.memory._record_memory_history()"};
  }
  Analysis analysis;
  analysis.schema = snapshot.schema;
  for (const RecordedRun& run : runs.value()) {
    analysis.devices.push_back(DeviceAnalyzer(snapshot, run).analyze());
  }
  return analysis;
}

}  // namespace gpumemx
