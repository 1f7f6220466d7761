// SPDX-License-Identifier: BSD-3-Clause
#include "core/miss_plan.hpp"

#include <algorithm>
#include <bit>

#include "core/planted.hpp"

namespace gpumemx {

namespace {

DeviceAddr page_up(DeviceAddr a) { return {round_up({a.n}, kPage).n}; }
DeviceAddr page_down(DeviceAddr a) { return {round_down({a.n}, kPage).n}; }

}  // namespace

std::optional<MissPlan> MissPlanner::plan(Heap& heap, const Candidate& candidate, Bytes size,
                                          const Policy& policy, bool may_exceed_budget) {
  policy_ = &policy;
  set_ = &heap.set();
  kind_ = heap.kind();
  size_ = size;
  reserved_ = policy.reserved;
  may_exceed_budget_ = may_exceed_budget;
  mark_ = handles_.next_serial();
  cursors_.clear();

  Region* region = candidate.region;
  const DeviceAddr at = candidate.at;
  const DeviceAddr begin = page_down(at), end = page_up(at + size);
  MissPlan plan;
  plan.heap = &heap;
  plan.at = at;
  plan.size = size;
  plan.fill_begin = at;
  plan.fill_end = at + size;

  // What is ready already may not be harvested for the rest.
  const auto next_after = [&](DeviceAddr page, const Mapping* m) {
    return m == nullptr ? page + kPage : m->end();
  };
  const auto mapping_at = [&](DeviceAddr page) -> Mapping* {
    return page < region->mapped_end && region->range.contains(page) ? region->mapping_at(page)
                                                                     : nullptr;
  };
  for (DeviceAddr page = begin; page < end;) {
    Mapping* m = mapping_at(page);
    if (m != nullptr && m->is_home()) m->handle->mark = mark_;
    page = next_after(page, m);
  }
  for (DeviceAddr page = begin; page < end;) {
    Mapping* m = mapping_at(page);
    page = next_after(page, m);
    if (m == nullptr || m->is_home()) continue;
    if (can_switch(*m, *set_) && m->handle->mark != mark_) {
      m->handle->mark = mark_;
      plan.switches.push_back(m);
    } else if (m->last_use.complete() || planted(Fault::kRepointEarly)) {
      m->mark = mark_;
      plan.stale.push_back(m);
    } else {
      return std::nullopt;
    }
  }

  const auto is_empty = [&](DeviceAddr page) {
    const Mapping* m = mapping_at(page);
    return m == nullptr || m->mark == mark_;
  };
  const DeviceAddr free_end = page_down(candidate.run_end);
  for (DeviceAddr page = begin; page < end;) {
    if (!is_empty(page)) {
      page = mapping_at(page)->end();
      continue;
    }
    DeviceAddr gap_end = page;
    while (gap_end < end && is_empty(gap_end)) gap_end = gap_end + kPage;
    const std::uint64_t gap = (gap_end - page).n / kPage.n;
    // The last gap may go on beyond the block, as far as nothing stands there.
    std::uint64_t room = gap;
    if (gap_end == end) {
      while (room < kMaxHandlePages && gap_end + kPage <= free_end && is_empty(gap_end)) {
        gap_end = gap_end + kPage;
        ++room;
      }
    }
    Piece piece;
    piece.at = page;
    if (!fill_gap(gap, room, piece)) return std::nullopt;
    page = page + kPage * piece.pages;
    plan.fill_begin = std::min(plan.fill_begin, piece.at);
    plan.fill_end = std::max(plan.fill_end, page);
    plan.pieces.push_back(piece);
  }
  return plan;
}

bool MissPlanner::fill_gap(std::uint64_t gap, std::uint64_t room, Piece& piece) {
  const Bytes capacity = policy_->capacity;
  const std::uint32_t wanted = static_cast<std::uint32_t>(std::min<std::uint64_t>(
      policy_->handle_pages(kind_, gap, size_), std::max<std::uint64_t>(room, 1)));
  const auto fits = [&](std::uint32_t pages, Bytes limit) {
    return reserved_ + kPage * pages <= limit;
  };

  piece.pages = wanted;
  if (fits(wanted, policy_->budget())) {
    reserved_ += kPage * wanted;
    return true;
  }
  if (Handle* handle = harvest(gap, room, /*any_overhang=*/false); handle != nullptr) {
    handle->mark = mark_;
    piece.handle = handle;
    piece.pages = handle->pages;
    return true;
  }
  const std::uint32_t cut = static_cast<std::uint32_t>(std::min<std::uint64_t>(gap, wanted));
  if (policy_->options.recut) {
    if (Handle* victim = recut_victim(); victim != nullptr) {
      victim->mark = mark_;
      piece.victim = victim;
      piece.pages = std::min(cut, victim->pages);
      reserved_ = reserved_ + kPage * piece.pages - victim->size();
      return true;
    }
  }
  piece.pages = cut;
  if (!fits(cut, policy_->budget())) {
    if (!may_exceed_budget_) return false;
    // Rather an idle handle that is far too large than more memory.
    if (Handle* handle = harvest(gap, room, /*any_overhang=*/true); handle != nullptr) {
      handle->mark = mark_;
      piece.handle = handle;
      piece.pages = handle->pages;
      return true;
    }
    if (!fits(cut, capacity)) {
      if (!fits(1, capacity)) return false;
      piece.pages = Policy::pages(round_down(capacity - reserved_, kPage));
    }
  }
  // A whole handle, not one cut to the gap: while a program grows, the next block goes on there.
  if (piece.pages == cut && wanted - cut <= policy_->ahead_pages(kind_) && fits(wanted, capacity)) {
    piece.pages = wanted;
  }
  reserved_ += kPage * piece.pages;
  return true;
}

Handle* MissPlanner::harvest(std::uint64_t gap, std::uint64_t room, bool any_overhang) {
  if (any_overhang) {
    // As far as there are free addresses.
  } else if (fills_pages(kind_)) {
    room = std::min(room, gap + Policy::pages(policy_->options.overhang));
  } else {
    // Larger handles would be pinned by a small part of this heap's short-lived blocks.
    room = std::min<std::uint64_t>(room, policy_->handle_pages(kind_, 1ull << 20, size_));
  }
  for (const bool others : {false, true}) {
    for (std::uint64_t pages = std::min<std::uint64_t>({gap, room, kMaxHandlePages}); pages > 0;
         --pages) {
      if (Handle* h = idle_of_size(static_cast<std::uint32_t>(pages), others)) return h;
    }
    for (std::uint64_t pages = gap + 1; pages <= std::min<std::uint64_t>(room, kMaxHandlePages);
         ++pages) {
      if (Handle* h = idle_of_size(static_cast<std::uint32_t>(pages), others)) return h;
    }
  }
  return nullptr;
}

// The handle of this size in a list that is idle longest and not in the plan yet. The place is kept
// for the length of a plan, so that a plan of many pieces does not look at its own again and again.
Handle* MissPlanner::longest_idle(const IdleList& list, std::uint32_t pages) {
  // Most lists are empty (streams that are long gone, other sizes) or untouched by the plan: only the
  // others are worth a place to be kept.
  Handle* front = list.front(pages);
  if (front == nullptr || front->mark != mark_) return front;
  const auto known = std::find_if(cursors_.begin(), cursors_.end(), [&](const Cursor& c) {
    return c.list == &list && c.pages == pages;
  });
  Cursor& cursor =
      known != cursors_.end() ? *known : cursors_.emplace_back(Cursor{&list, pages, front});
  while (cursor.next != nullptr && cursor.next->mark == mark_) cursor.next = cursor.next->idle_next;
  return cursor.next;
}

Handle* MissPlanner::idle_of_size(std::uint32_t pages, bool others) {
  // Within one list the front is idle longest; if its last use is not complete, none behind it is
  // (but for handles that came from elsewhere, which are not worth a longer search).
  constexpr int kLook = 4;
  const auto first_usable = [&](const IdleList& list) -> Handle* {
    int looked = 0;
    for (Handle* h = longest_idle(list, pages); h != nullptr && looked < kLook; h = h->idle_next) {
      if (h->mark == mark_) continue;
      if (usable_by(*h, *set_)) return h;
      ++looked;
    }
    return nullptr;
  };
  if (!others) {
    if (!set_->is_private || planted(Fault::kPrivateHarvested)) {
      if (Handle* h = first_usable(set_->idle)) return h;
    }
    return first_usable(handles_.loose());
  }
  Handle* oldest = nullptr;
  for (const HeapSet* set : sets_) {
    if (set == set_ || set->is_private) continue;
    Handle* h = first_usable(set->idle);
    if (h != nullptr && (oldest == nullptr || h->idle_since < oldest->idle_since)) oldest = h;
  }
  return oldest;
}

Handle* MissPlanner::recut_victim() {
  const auto can_go = [](const Handle* h) {
    if (h->busy() || !h->last_use.complete()) return false;
    for (const Mapping* m = h->aliases; m != nullptr; m = m->next_alias) {
      if (!m->last_use.complete()) return false;
    }
    return true;
  };
  for (std::uint32_t pages = 1; pages <= kMaxHandlePages; ++pages) {
    Handle* oldest = nullptr;
    const auto look = [&](const IdleList& list) {
      constexpr int kLook = 8;
      int looked = 0;
      for (Handle* h = longest_idle(list, pages); h != nullptr && looked < kLook;
           h = h->idle_next) {
        if (h->mark == mark_) continue;
        ++looked;
        if (!can_go(h)) continue;
        if (oldest == nullptr || h->idle_since < oldest->idle_since) oldest = h;
        break;
      }
    };
    look(handles_.loose());
    for (const HeapSet* set : sets_) {
      if (!set->is_private) look(set->idle);
    }
    if (oldest != nullptr) return oldest;
  }
  return nullptr;
}

}  // namespace gpumemx
