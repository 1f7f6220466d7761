// SPDX-License-Identifier: BSD-3-Clause
#include "core/placement.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "core/planted.hpp"

namespace gpumemx {

namespace {

constexpr double kMib = 1u << 20;
// How far ahead a run is fetched, in pages; most handles have four or more.
constexpr std::uint64_t kFetchAhead = 64;
constexpr std::uint64_t kFetchStep = 4;

DeviceAddr page_up(DeviceAddr a) { return {round_up({a.n}, kPage).n}; }
DeviceAddr page_down(DeviceAddr a) { return {round_down({a.n}, kPage).n}; }

// What a block in a ready block would newly make busy.
class ReadyEnds {
 public:
  explicit ReadyEnds(const Block& ready)
      : region_(*ready.region),
        low_(region_.mapping_at(ready.begin)),
        high_(region_.mapping_at(ready.end() - kGranule)) {}

  // All of the ready block is on one handle: it makes no difference where a block stands in it.
  bool one_handle() const { return low_ == high_; }

  // Bytes of the handles under [at, at + size) that are idle.
  Bytes newly_busy(DeviceAddr at, Bytes size) const {
    const Mapping* low = mapping_at(at);
    const Mapping* high = mapping_at(at + size - kGranule);
    const DeviceAddr begin = low->uses != 0 ? low->end() : low->begin;
    const DeviceAddr end = high->uses != 0 ? high->begin : high->end();
    return begin < end ? end - begin : Bytes{};
  }

 private:
  const Mapping* mapping_at(DeviceAddr a) const {
    if (a < low_->end()) return low_;
    return a < high_->begin ? region_.mapping_at(a) : high_;
  }

  const Region& region_;
  const Mapping* low_;
  const Mapping* high_;
};

}  // namespace

std::optional<Hit> find_hit(const Heap& heap, Bytes size, int scan) {
  std::optional<Hit> best;
  Bytes best_block;
  const std::int64_t nothing_new = -static_cast<std::int64_t>(size.n);
  const auto look = [&](Block* block) {
    if (block->held == block->size) {  // it is on busy handles only
      best = Hit{block, block->begin, nothing_new};
      return;
    }
    // Wherever it stands, no more of it than `held` is on busy handles: most blocks can't win.
    const std::int64_t least = -static_cast<std::int64_t>(std::min(block->held, size).n);
    if (best && (least > best->waste || (least == best->waste && block->size >= best_block)))
      return;
    const ReadyEnds ends(*block);
    const DeviceAddr last = block->end() - size;
    const DeviceAddr rounded_first = page_up(block->begin);
    const DeviceAddr rounded_last =
        page_down(block->end()).n >= size.n ? page_down(block->end()) - size : DeviceAddr{};
    for (const DeviceAddr at : {block->begin, last, rounded_first, rounded_last}) {
      if (at < block->begin || at > last) continue;
      const std::int64_t waste =
          static_cast<std::int64_t>(ends.newly_busy(at, size).n) + nothing_new;
      if (!best || waste < best->waste || (waste == best->waste && block->size < best_block)) {
        best = Hit{block, at, waste};
        best_block = block->size;
      }
      if (ends.one_handle()) break;
    }
  };
  const FreeIndex& free = heap.free();
  Block* block = free.first_from(bin_of(size));
  for (int n = 0; block != nullptr && n < scan; block = free.after(block), ++n) {
    if (block->size < size) continue;
    if (block->size == size) return Hit{block, block->begin, nothing_new};
    look(block);
    if (best->waste == nothing_new) return best;  // nothing newly busy
  }
  // All that was seen were blocks of the own bin that are a little too small: any block of a higher
  // bin fits.
  if (!best && block != nullptr) {
    if (Block* larger = free.first_from(bin_of(size) + 1)) look(larger);
  }
  return best;
}

bool usable_by(const Handle& handle, const HeapSet& set) {
  // Only what is idle waits in a list, which spares a look at its home.
  if (handle.pinned || handle.idle_list == nullptr) return false;
  if (handle.last_use.complete()) return true;
  if (set.is_private) return planted(Fault::kPrivateMerelyOrdered);
  return handle.last_use.timeline == set.timeline || planted(Fault::kOtherStreamUnchecked);
}

bool can_switch(const Mapping& alias, const HeapSet& set) {
  if (planted(Fault::kSwitchBusyAlias) && !alias.is_home() && !alias.handle->pinned) return true;
  return !alias.is_home() && usable_by(*alias.handle, set);
}

std::span<const Candidate> CandidateSearch::find(const Heap& heap, Bytes size, const Policy& policy,
                                                 HandlePool& handles, std::size_t most) {
  heap_ = &heap;
  size_ = size;
  policy_ = &policy;
  handles_ = &handles;
  handle_pages_ = policy.handle_pages(heap.kind(), 1ull << 20, size);
  price_ = policy.price(heap.kind());
  repoint_cost_ = policy.repoint_cost();
  found_.clear();
  collect_runs();
  const bool all = most == kAllPlaces;
  sure_ = std::numeric_limits<double>::infinity();
  stretches_.clear();
  std::uint64_t searched = 0;
  bool is_good = false;
  for (Run& run : runs_) {
    read_run(run);
    if (run.longest_row < size_) continue;
    search_run(run);
    is_good = !all && sure_ <= static_cast<double>(policy.switch_waste(searched++).n) / kMib;
    if (is_good) break;
  }
  if (!is_good) {
    for (const Run& run : runs_) {
      if (run.longest_row < size_ && (all || can_win(run))) search_run(run);
    }
  }
  most = std::min(most, found_.size());
  std::partial_sort(found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(most),
                    found_.end(), [](const Candidate& a, const Candidate& b) {
                      return std::tie(a.key, a.pages_pinned, a.run, a.at) <
                             std::tie(b.key, b.pages_pinned, b.run, b.at);
                    });
  return {found_.data(), most};
}

// A run without void parts is one ready block, found by its size; every other run has a void block,
// so those are found from the voids. Nothing has to be kept up to date for this on the way of a hit.
void CandidateSearch::collect_runs() {
  runs_.clear();
  const auto limit = static_cast<std::size_t>(policy_->options.miss_runs);
  std::size_t whole = 0;
  const auto void_next_to = [](const Block* b) {
    return (b->prev != nullptr && b->prev->state == BlockState::kVoid) ||
           (b->next != nullptr && b->next->state == BlockState::kVoid);
  };
  const FreeIndex& free = heap_->free();
  for (Block* b = free.first_from(bin_of(size_)); b != nullptr && whole < limit;
       b = free.after(b)) {
    if (b->size < size_ || void_next_to(b)) continue;
    runs_.push_back({b, b, b->begin, b->end(), false, {}, 0, 0});
    ++whole;
  }
  const Block* open_end = heap_->regions().back()->last;
  std::optional<Run> open;
  for (Block* b = free.voids(); b != nullptr; b = b->list_next) {
    Block* first = b;
    bool seen = false;
    while (first->prev != nullptr && first->prev->is_free()) {
      first = first->prev;
      if (first->state == BlockState::kVoid) {
        seen = true;  // an earlier void block of the run will find it
        break;
      }
    }
    if (seen) continue;
    Run run{first, b, first->begin, b->end(), b == open_end, {}, 0, 0};
    for (Block* n = b->next; n != nullptr && n->is_free(); n = n->next) {
      run.last = n;
      run.end = n->end();
      run.open = run.open || n == open_end;
    }
    if (run.end - run.begin < size_) continue;
    if (run.open) {
      open = run;
    } else {
      runs_.push_back(run);
    }
  }
  const auto by_size = [](const Run& a, const Run& b) {
    const Bytes x = a.end - a.begin, y = b.end - b.begin;
    return x != y ? x < y : a.begin < b.begin;
  };
  const std::size_t kept = std::min(runs_.size(), limit);
  std::partial_sort(runs_.begin(), runs_.begin() + static_cast<std::ptrdiff_t>(kept), runs_.end(),
                    by_size);
  runs_.resize(kept);
  if (open) runs_.push_back(*open);
}

void CandidateSearch::search_run(const Run& run) {
  read_ = std::span(stretches_).subspan(run.first_stretch, run.stretch_count);
  sum_up();
  const int places = policy_->options.miss_extents;
  from(run, run.begin);
  if (!run.open) upto(run, run.end);

  int ready = 0;
  for (const Block* b = run.first; b != nullptr && b->begin < run.end && ready < places;
       b = b->next) {
    if (b->state != BlockState::kReady) continue;
    from(run, b->begin);
    upto(run, b->end());
    ++ready;
  }

  // Begins of rows of dormant aliases.
  int aliases = 0;
  bool in_row = false;
  for (const Stretch& s : read_) {
    const bool alias = s.ground != Ground::kEmpty && s.ground != Ground::kHome;
    if (alias && !in_row) {
      evaluate(run, s.begin);
      if (++aliases == places) break;
    }
    in_row = alias;
  }

  if (run.open) {  // beyond everything that is mapped: always possible, and the last resort
    const DeviceAddr floor = page_up(run.begin);
    run.first->region->tighten_mapped_end(floor);
    evaluate(run, std::max(run.first->region->mapped_end, floor));
  }
}

// Reads the pages of a run up to the last that has a mapping; beyond, everything is empty.
void CandidateSearch::read_run(Run& run) {
  const HeapSet& set = heap_->set();
  const Region* region = run.first->region;
  run.first_stretch = stretches_.size();
  const DeviceAddr end = page_up(run.end);
  const DeviceAddr begin = page_down(run.begin);
  const DeviceAddr mapped = std::min(end, std::max(region->mapped_end, begin));
  // The records are scattered, and cold when the program has just done something else.
  DeviceAddr fetched = begin;
  const auto fetch_upto = [&](DeviceAddr limit) {
    for (limit = std::min(limit, mapped); fetched < limit; fetched = fetched + kPage * kFetchStep) {
      if (const Mapping* m = region->mapping_at(fetched)) __builtin_prefetch(m);
    }
  };
  // Field by field: put together on the stack and copied, a stretch costs several times as much, for
  // the copy has to wait for the fields.
  const auto add = [&](DeviceAddr from, DeviceAddr to, Ground ground, const Mapping* m) {
    Stretch& s = stretches_.emplace_back();
    s.begin = from;
    s.end = to;
    s.ground = ground;
    if (m == nullptr) return;
    s.handle = m->handle;
    s.idle = m->uses == 0;
  };
  Bytes longest;
  DeviceAddr row = begin;  // its begin
  const auto end_row = [&](DeviceAddr at) { longest = std::max(longest, at - row); };
  for (DeviceAddr page = begin; page < mapped;) {
    fetch_upto(page + kPage * kFetchAhead);
    const Mapping* m = region->mapping_at(page);
    if (m == nullptr) {
      end_row(page);
      DeviceAddr next = page + kPage;
      while (next < mapped && region->mapping_at(next) == nullptr) next = next + kPage;
      add(page, next, Ground::kEmpty, nullptr);
      row = page = next;
      continue;
    }
    const DeviceAddr next = std::min(m->end(), end);
    if (m->is_home()) {
      add(page, next, Ground::kHome, m);
    } else if (can_switch(*m, set)) {
      add(page, next, Ground::kSwitch, m);
    } else {
      end_row(page);
      add(page, next, m->last_use.complete() ? Ground::kStale : Ground::kBlocked, m);
      row = next;
    }
    page = m->end();
  }
  end_row(mapped);
  if (mapped < end) add(mapped, end, Ground::kEmpty, nullptr);
  run.stretch_count = stretches_.size() - run.first_stretch;
  run.longest_row = longest;
}

// False when no place in a run without a row that is long enough can be cheaper than one that is known
// and sure to serve: each costs at least one handle to map, and no block spares more than lies on busy
// handles, which only the two ends of a run do.
bool CandidateSearch::can_win(const Run& run) const {
  const auto held = [](const Block* b) {
    return b != nullptr && b->state == BlockState::kReady ? b->held : Bytes{};
  };
  const Block* last = run.open ? nullptr : run.last;
  const Bytes spared = held(run.first) + held(last);
  return price_ * kMapCost - static_cast<double>(spared.n) / kMib <= sure_;
}

void CandidateSearch::sum_up() {
  const std::uint64_t search = handles_->next_serial();
  twins_.clear();
  Sums sums;
  bool in_gap = false;
  for (std::size_t i = 0; i < read_.size(); ++i) {
    Stretch& s = read_[i];
    s.before.missing = sums.missing;  // one by one, as in read_run()
    s.before.pinned = sums.pinned;
    s.before.gaps = sums.gaps;
    s.before.stale = sums.stale;
    s.before.switches = sums.switches;
    s.before.blocked = sums.blocked;
    if (s.ground == Ground::kHome || s.ground == Ground::kSwitch) {
      if (s.handle->mark == search) {
        twins_.push_back({s.handle->mark_place, i});
      } else {
        s.handle->mark = search;
      }
      s.handle->mark_place = static_cast<std::uint32_t>(i);
      if (s.idle) sums.pinned += s.handle->pages;
      if (s.ground == Ground::kSwitch) ++sums.switches;
      in_gap = false;
    } else if (s.ground == Ground::kBlocked) {
      sums.pinned += s.handle->pages;
      ++sums.blocked;
      in_gap = false;
    } else {
      const std::uint64_t covered = (s.end - s.begin).n / kPage.n;
      sums.missing += covered;
      sums.pinned += covered;
      if (!in_gap) ++sums.gaps;
      if (s.ground == Ground::kStale) ++sums.stale;
      in_gap = true;
    }
  }
  total_ = sums;
}

void CandidateSearch::from(const Run& run, DeviceAddr begin) {
  evaluate(run, begin);
  if (const DeviceAddr rounded = page_up(begin); rounded != begin) evaluate(run, rounded);
}

void CandidateSearch::upto(const Run& run, DeviceAddr end) {
  if (end.n < size_.n) return;
  evaluate(run, end - size_);
  const DeviceAddr rounded = page_down(end);
  if (rounded != end && rounded.n >= size_.n) evaluate(run, rounded - size_);
}

void CandidateSearch::evaluate(const Run& run, DeviceAddr at) {
  if (at < run.begin || at + size_ > run.end) return;
  const DeviceAddr begin = page_down(at), end = page_up(at + size_);
  const auto stretch_at = [&](DeviceAddr page) {
    const auto above = std::upper_bound(read_.begin(), read_.end(), page,
                                        [](DeviceAddr a, const Stretch& s) { return a < s.begin; });
    return static_cast<std::size_t>(above - read_.begin()) - 1;
  };
  const std::size_t first = stretch_at(begin), last = stretch_at(end - kPage);
  const bool twice = std::any_of(twins_.begin(), twins_.end(), [&](const Twin& twin) {
    return first <= twin.first && twin.second <= last;
  });
  const std::optional<Sums> sums =
      twice ? sums_by_page(run, begin, end) : sums_of(first, last, begin, end);
  if (!sums) return;
  const double maps = std::max(std::ceil(static_cast<double>(sums->missing) / handle_pages_),
                               static_cast<double>(sums->gaps));
  const double cost = maps * kMapCost + sums->stale * repoint_cost_ + sums->switches * kSwitchCost;
  const double waste = (static_cast<double>(sums->pinned) * static_cast<double>(kPage.n) -
                        static_cast<double>(size_.n)) /
                       kMib;
  const double key = waste + price_ * cost;
  if (sums->missing == 0) sure_ = std::min(sure_, key);
  found_.push_back({key, sums->pinned, run.open ? Bytes{~0ull} : run.end - run.begin, at, run.end,
                    run.first->region});
}

// Of the pages [begin, end), which lie on the stretches first to last; nothing when a mapping that is
// in use is in the way.
std::optional<CandidateSearch::Sums> CandidateSearch::sums_of(std::size_t first, std::size_t last,
                                                              DeviceAddr begin,
                                                              DeviceAddr end) const {
  const Stretch& low = read_[first];
  const Stretch& high = read_[last];
  const Sums& upto = last + 1 < read_.size() ? read_[last + 1].before : total_;
  if (upto.blocked != low.before.blocked) return std::nullopt;
  const auto is_gap = [](const Stretch& s) {
    return s.ground == Ground::kEmpty || s.ground == Ground::kStale;
  };
  // What of the two outer gaps lies outside.
  std::uint64_t outside = 0;
  if (is_gap(low)) outside += (begin - low.begin).n / kPage.n;
  if (is_gap(high)) outside += (high.end - end).n / kPage.n;
  const bool low_began_before = is_gap(low) && first > 0 && is_gap(read_[first - 1]);
  Sums sums;
  sums.missing = upto.missing - low.before.missing - outside;
  sums.pinned = upto.pinned - low.before.pinned - outside;
  sums.gaps = upto.gaps - low.before.gaps + (low_began_before ? 1 : 0);
  sums.stale = upto.stale - low.before.stale;
  sums.switches = upto.switches - low.before.switches;
  return sums;
}

// The same where a handle stands twice: it can serve only once.
std::optional<CandidateSearch::Sums> CandidateSearch::sums_by_page(const Run& run, DeviceAddr begin,
                                                                   DeviceAddr end) {
  const HeapSet& set = heap_->set();
  const Region* region = run.first->region;
  const std::uint64_t search = handles_->next_serial();
  Sums sums;
  bool in_gap = false;
  for (DeviceAddr page = begin; page < end;) {
    const Mapping* m = page < region->mapped_end ? region->mapping_at(page) : nullptr;
    const DeviceAddr next = m == nullptr ? page + kPage : m->end();
    const bool ready = m != nullptr && m->is_home();
    if (ready || (m != nullptr && m->handle->mark != search && can_switch(*m, set))) {
      in_gap = false;
      if (!ready) ++sums.switches;
      if (m->uses == 0) sums.pinned += m->handle->pages;
      m->handle->mark = search;
    } else {
      // Another mapping has to come here, which this address allows only when it is not in use.
      if (m != nullptr && !m->last_use.complete()) return std::nullopt;
      if (m != nullptr) ++sums.stale;
      if (!in_gap) ++sums.gaps;
      in_gap = true;
      const std::uint64_t covered = (std::min(next, end) - page).n / kPage.n;
      sums.missing += covered;
      sums.pinned += covered;
    }
    page = next;
  }
  return sums;
}

}  // namespace gpumemx
