// SPDX-License-Identifier: BSD-3-Clause
#include "core/placement.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "core/planted.hpp"

namespace gpumemx {

namespace {

DeviceAddr page_up(DeviceAddr a) { return {round_up({a.n}, kPage).n}; }
DeviceAddr page_down(DeviceAddr a) { return {round_down({a.n}, kPage).n}; }

// Bytes of handles that a block at [at, at + size) of a ready block would newly make busy.
Bytes newly_busy(const Block& ready, DeviceAddr at, Bytes size) {
  const Mapping* low = ready.region->mapping_at(at);
  const Mapping* high = ready.region->mapping_at(at + size - kGranule);
  const DeviceAddr begin = low->uses != 0 ? low->end() : low->begin;
  const DeviceAddr end = high->uses != 0 ? high->begin : high->end();
  return begin < end ? end - begin : Bytes{};
}

}  // namespace

std::optional<Hit> find_hit(const Heap& heap, Bytes size, int scan) {
  std::optional<Hit> best;
  Bytes best_block;
  const auto look = [&](Block* block) {
    const DeviceAddr last = block->end() - size;
    const DeviceAddr rounded_first = page_up(block->begin);
    const DeviceAddr rounded_last =
        page_down(block->end()).n >= size.n ? page_down(block->end()) - size : DeviceAddr{};
    for (const DeviceAddr at : {block->begin, last, rounded_first, rounded_last}) {
      if (at < block->begin || at > last) continue;
      const std::int64_t waste = static_cast<std::int64_t>(newly_busy(*block, at, size).n) -
                                 static_cast<std::int64_t>(size.n);
      if (!best || waste < best->waste || (waste == best->waste && block->size < best_block)) {
        best = Hit{block, at, waste};
        best_block = block->size;
      }
    }
  };
  const FreeIndex& free = heap.free();
  Block* block = free.first_from(bin_of(size));
  for (int n = 0; block != nullptr && n < scan; block = free.after(block), ++n) {
    if (block->size < size) continue;
    if (block->size == size) return Hit{block, block->begin, -static_cast<std::int64_t>(size.n)};
    look(block);
    if (best->waste == -static_cast<std::int64_t>(size.n)) return best;  // nothing newly busy
  }
  // All that was seen were blocks of the own bin that are a little too small: any block of a higher
  // bin fits.
  if (!best && block != nullptr) {
    if (Block* larger = free.first_from(bin_of(size) + 1)) look(larger);
  }
  return best;
}

bool usable_by(const Handle& handle, const HeapSet& set) {
  if (handle.pinned || handle.busy()) return false;
  if (handle.last_use.complete()) return true;
  if (set.is_private) return planted(Fault::kPrivateMerelyOrdered);
  return handle.last_use.timeline == set.timeline || planted(Fault::kOtherStreamUnchecked);
}

bool can_switch(const Mapping& alias, const HeapSet& set) {
  if (planted(Fault::kSwitchBusyAlias) && !alias.is_home() && !alias.handle->pinned) return true;
  return !alias.is_home() && usable_by(*alias.handle, set);
}

const std::vector<Candidate>& CandidateSearch::find(const Heap& heap, Bytes size,
                                                    const Policy& policy, HandlePool& handles) {
  heap_ = &heap;
  size_ = size;
  policy_ = &policy;
  handles_ = &handles;
  handle_pages_ = policy.handle_pages(heap.kind(), 1ull << 20, size);
  price_ = policy.price(heap.kind());
  found_.clear();
  collect_runs();
  for (const Run& run : runs_) search_run(run);
  std::sort(found_.begin(), found_.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.key, a.pages_pinned, a.run, a.at) <
           std::tie(b.key, b.pages_pinned, b.run, b.at);
  });
  return found_;
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
    runs_.push_back({b, b->begin, b->end(), false});
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
    Run run{first, first->begin, b->end(), b == open_end};
    for (const Block* n = b->next; n != nullptr && n->is_free(); n = n->next) {
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
  if (runs_.size() > limit) {
    std::nth_element(runs_.begin(), runs_.begin() + static_cast<std::ptrdiff_t>(limit), runs_.end(),
                     by_size);
    runs_.resize(limit);
  }
  if (open) runs_.push_back(*open);
}

void CandidateSearch::search_run(const Run& run) {
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

  // Begins of stretches of dormant aliases.
  Region* region = run.first->region;
  int aliases = 0;
  for (const Block* b = run.first; b != nullptr && b->begin < run.end && aliases < places;
       b = b->next) {
    if (b->state != BlockState::kVoid) continue;
    bool in_stretch = false;
    const DeviceAddr end = std::min(b->end(), region->mapped_end);
    for (DeviceAddr a = b->begin; a < end && aliases < places;) {
      const Mapping* m = region->mapping_at(a);
      if (m == nullptr) {
        in_stretch = false;
        a = a + kPage;
        continue;
      }
      if (!in_stretch) {
        evaluate(run, a);
        ++aliases;
      }
      in_stretch = true;
      a = m->end();
    }
  }

  if (run.open) {  // beyond everything that is mapped: always possible, and the last resort
    const DeviceAddr floor = page_up(run.begin);
    region->tighten_mapped_end(floor);
    evaluate(run, std::max(region->mapped_end, floor));
  }
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
  const HeapSet& set = heap_->set();
  Region* region = run.first->region;
  const std::uint64_t search = handles_->next_serial();
  std::uint64_t missing = 0, pinned = 0;
  int gaps = 0, stale = 0, switches = 0;
  bool in_gap = false;
  const DeviceAddr end = page_up(at + size_);
  for (DeviceAddr page = page_down(at); page < end;) {
    const Mapping* m = page < region->mapped_end ? region->mapping_at(page) : nullptr;
    if (m == nullptr) {
      if (page >= region->mapped_end) {  // all the rest is missing
        const std::uint64_t rest = (end - page).n / kPage.n;
        gaps += in_gap ? 0 : 1;
        missing += rest;
        pinned += rest;
        break;
      }
      gaps += in_gap ? 0 : 1;
      in_gap = true;
      ++missing;
      ++pinned;
      page = page + kPage;
      continue;
    }
    Handle* handle = m->handle;
    if (m->is_home()) {
      in_gap = false;
      if (m->uses == 0) pinned += handle->pages;
      handle->mark = search;
    } else if (can_switch(*m, set) && handle->mark != search) {
      in_gap = false;
      ++switches;
      pinned += handle->pages;
      handle->mark = search;
    } else {
      // Another mapping has to come here, which this address allows only when it is not in use.
      if (!m->last_use.complete()) return;
      gaps += in_gap ? 0 : 1;
      in_gap = true;
      ++stale;
      const std::uint64_t covered = (std::min(m->end(), end) - page).n / kPage.n;
      missing += covered;
      pinned += covered;
    }
    page = m->end();
  }
  const double maps =
      std::max(std::ceil(static_cast<double>(missing) / handle_pages_), static_cast<double>(gaps));
  const double cost = maps * kMapCost + stale * kRepointCost + switches * kSwitchCost;
  const double waste =
      (static_cast<double>(pinned) * static_cast<double>(kPage.n) - static_cast<double>(size_.n)) /
      static_cast<double>(1u << 20);
  found_.push_back({waste + price_ * cost, pinned, run.open ? Bytes{~0ull} : run.end - run.begin,
                    at, run.end, region});
}

}  // namespace gpumemx
