// SPDX-License-Identifier: BSD-3-Clause
//
// Giving memory back to the device: all that is idle, one released pool's, or down to a target.
#include <algorithm>
#include <bit>
#include <optional>

#include "core/allocator.hpp"
#include "core/planted.hpp"

namespace gpumemx {

namespace {

// Nothing that is queued uses the memory, at whichever address.
bool can_be_released(const Handle& handle) {
  if (planted(Fault::kReleaseEarly)) return true;
  if (!handle.last_use.complete()) return false;
  for (const Mapping* m = handle.aliases; m != nullptr; m = m->next_alias) {
    if (!m->last_use.complete()) return false;
  }
  return true;
}

}  // namespace

TrimReport DeviceAllocator::trim(const TrimRequest& request) {
  const TrimReport report = trim_cache(request);
  (void)hand_back_segments();
  return report;
}

TrimReport DeviceAllocator::trim_cache(const TrimRequest& request) {
  TrimReport report;
  if (shut_down_) return report;
  const RelaxedCapture relaxed(driver_);
  // What the background thread releases while this one waits came back too, as was predicted.
  std::optional<Bytes> at_prediction;
  // In a capture nothing is waited for: what goes then is what is found complete.
  const bool waits = request.wait && captures_.load() == 0;
  if (waits) {
    if (request.predict) {
      const MutexLock work(work_mu_);
      const MutexLock lock(mu_);
      unpark_all();
      report.predicted = releasable(/*wait=*/true);
      at_prediction = reserved();
    }
    wait_for_idle_memory();
  }
  close_epochs();
  const MutexLock work(work_mu_);
  poll();
  const MutexLock lock(mu_);
  unpark_all();
  const Bytes before = at_prediction.value_or(reserved());
  if (request.predict && !at_prediction) report.predicted = releasable(/*wait=*/false);
  if (captures_.load() == 0) (void)keep_no_longer();
  (void)release_doomed();
  Bytes target = request.target;
  if (request.pool) {
    // What one pool had becomes loose when it is dissolved; as much goes back.
    const Bytes loose_before = books_.handles.loose().bytes();
    dissolve_released_pools();
    const Bytes loose = books_.handles.loose().bytes();
    const Bytes from_pool = loose > loose_before ? loose - loose_before : Bytes{};
    target = std::max(target, reserved() > from_pool ? reserved() - from_pool : Bytes{});
  } else {
    dissolve_released_pools();
  }
  (void)release_idle(target);
  note_tight();

  // A later phase of the program grows anew: up to its own peak, not to that of an earlier one.
  if (!request.pool && request.target.n == 0) {
    count_on(nullptr);
    peak_live_ = {static_cast<std::uint64_t>(books_.stats.requested_bytes.all().current)};
    peak_at_mark_ = peak_live_;
    requests_since_mark_ = 0;
    has_settled_ = false;
  }
  const MemoryFigures now = figures();
  report.released = before - std::min(before, now.reserved);
  report.live = now.live + now.pending;
  report.held = now.held;
  report.pending = now.idle_pending;
  report.pools = now.idle_private;
  report.wanted = now.idle;
  return report;
}

// Waits for the last event of every stream, so that what is idle now is complete afterwards.
void DeviceAllocator::wait_for_idle_memory() {
  if (captures_.load() > 0) return;
  close_epochs(/*also_captured=*/false, /*beyond_limit=*/true);
  struct Last {
    Timeline* line;
    Timeline::Fence fence;
  };
  std::vector<Last> lasts;
  {
    MutexLock lock(mu_);
    for (Timeline* line : timeline_list_) {
      Timeline::Fence* fence = line->newest();
      if (fence == nullptr || fence->epoch <= line->done()) continue;
      ++fence->waiters;
      lasts.push_back({line, *fence});
    }
  }
  for (const Last& last : lasts) (void)wait_for(*last.line, last.fence.event, last.fence.epoch);
}

// Releases idle handles, loose ones first, then those idle longest, until reserved is at most
// `target`. Returns how much went.
Bytes DeviceAllocator::release_idle(Bytes target) {
  unpark_all();
  const Bytes before = reserved();
  // One list at a time, gathered first: the books are open while the driver works.
  std::vector<IdleList*> lists{&books_.handles.loose()};
  for (HeapSet* set : default_sets_) lists.push_back(&set->idle);
  for (IdleList* list : lists) {
    std::vector<Handle*> idle;
    list->for_each([&](Handle* h) {
      if (can_be_released(*h)) idle.push_back(h);
    });
    std::sort(idle.begin(), idle.end(),
              [](const Handle* a, const Handle* b) { return a->idle_since < b->idle_since; });
    for (Handle* h : idle) {
      if (reserved() <= target) break;
      // A hit may have taken it while the books were open.
      if (h->idle_list != list || !can_be_released(*h)) continue;
      list->remove(h);
      if (!release(h)) break;
    }
  }
  if (captures_.load() == 0) (void)release_idle_plain(target);
  return before - std::min(before, reserved());
}

// What a released pool has left can't be marked: it is not idle for anybody yet.
bool DeviceAllocator::released_pools_have_idle() const {
  for (const auto& [key, set] : sets_) {
    const auto pool = pools_.find(key.pool);
    if (pool == pools_.end() || pool->second.users > 0) continue;
    for (const auto& heap : set->heaps) {
      if (heap == nullptr) continue;
      for (const Region* region : heap->regions()) {
        for (DeviceAddr a = region->range.begin; a < region->mapped_end;) {
          const Mapping* m = region->mapping_at(a);
          if (m != nullptr && m->is_home() && m->uses == 0) return true;
          a = m == nullptr ? DeviceAddr{a.n / kPage.n * kPage.n} + kPage : m->end();
        }
      }
    }
  }
  return false;
}

std::optional<Bytes> DeviceAllocator::give_back_later() {
  if (shut_down_) return Bytes{};
  MutexLock lock(mu_);
  if (books_.history.on() || released_pools_have_idle()) return std::nullopt;
  unpark_all();
  returning_mark_ = books_.handles.next_serial();
  Bytes marked = books_.handles.loose().bytes();
  for (const HeapSet* set : default_sets_) marked += set->idle.bytes();
  return marked;
}

Bytes DeviceAllocator::returning() const {
  MutexLock lock(mu_);
  Bytes bytes;
  if (returning_mark_ == 0) return bytes;
  const std::uint64_t mark = returning_mark_;
  books_.handles.for_each([&](const Handle* h) {
    if (h->idle_before(mark)) bytes += h->size();
  });
  return bytes;
}

// Takes the marked handle that is idle longest out of circulation. False when none is left whose work
// is done.
bool DeviceAllocator::doom_returning() {
  if (returning_mark_ == 0) return false;
  const std::uint64_t mark = returning_mark_;
  Handle* oldest = nullptr;
  const auto look = [&](const IdleList& list) {
    // Handles of one size are in the order of their idleness.
    for (std::uint64_t sizes = list.sizes(); sizes != 0; sizes &= sizes - 1) {
      Handle* h = list.front(static_cast<std::uint32_t>(std::countr_zero(sizes)));
      if (!h->idle_before(mark) || !can_be_released(*h)) continue;
      if (oldest == nullptr || h->idle_since < oldest->idle_since) oldest = h;
    }
  };
  look(books_.handles.loose());
  for (const HeapSet* set : default_sets_) look(set->idle);
  if (oldest == nullptr) return false;
  oldest->idle_list->remove(oldest);
  oldest->pinned = true;  // nobody takes it any more
  doomed_.push_back(oldest);
  return true;
}

Bytes DeviceAllocator::release_idle_plain(Bytes target) {
  const Bytes before = reserved();
  for (std::size_t i = 0; i < default_sets_.size(); ++i) {
    for (const HeapKind kind : {HeapKind::kPlainSmall, HeapKind::kPlainLarge}) {
      Heap* heap = default_sets_[i]->heap_if_any(kind);
      if (heap == nullptr) continue;
      bool again = true;
      while (again && reserved() > target) {
        again = false;
        for (Region* region : heap->regions()) {
          Mapping* segment = region->mapping_at(region->range.begin);
          if (segment->uses != 0 || !segment->last_use.complete()) continue;
          again = release_plain(segment->handle);  // changes the list of regions
          break;
        }
      }
    }
  }
  return before - std::min(before, reserved());
}

}  // namespace gpumemx
