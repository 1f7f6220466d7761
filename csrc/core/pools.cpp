// SPDX-License-Identifier: BSD-3-Clause
//
// Private pools: their life, and how their memory moves on after the last release. The heap sets of
// streams that are gone are taken apart in the same way.
//
// A graph may be replayed on any stream, so what a pool's memory was last used for can't be told from
// the streams of its blocks. At the last release an event is recorded on every stream that the
// allocator knows; when all of those are reached, the pool's idle memory is as good as new.
#include <algorithm>

#include "base/check.hpp"
#include "core/allocator.hpp"
#include "core/planted.hpp"

namespace gpumemx {

PoolId DeviceAllocator::create_pool(PoolOptions options) {
  MutexLock lock(mu_);
  const PoolId id{++last_pool_};
  pools_[id].options = options;
  return id;
}

void DeviceAllocator::retain_pool(PoolId pool) {
  MutexLock lock(mu_);
  const auto found = pools_.find(pool);
  GPUMEMX_CHECK(found != pools_.end() && found->second.users > 0,
                "retain_pool() of a pool that does not exist or was released");
  ++found->second.users;
}

void DeviceAllocator::release_pool(PoolId pool) {
  if (shut_down_) return;
  std::vector<std::pair<Timeline*, std::uint64_t>> closed;
  {
    MutexLock lock(mu_);
    const auto found = pools_.find(pool);
    GPUMEMX_CHECK(found != pools_.end() && found->second.users > 0,
                  "release_pool() of a pool that does not exist or was released");
    if (--found->second.users > 0) return;
    for (Timeline* line : timeline_list_) {
      // A temporary stream may be gone; its last event covers all that it did for us.
      if (!line->stream().permanent) {
        found->second.until.push_back({line, line->epoch() - 1});
        continue;
      }
      const std::uint64_t epoch = line->advance();
      found->second.until.push_back({line, epoch});
      closed.emplace_back(line, epoch);
    }
    if (planted(Fault::kPoolDissolvedEarly)) found->second.until.clear();
  }
  for (const auto& [line, epoch] : closed) record_fence(*line, epoch);
}

bool DeviceAllocator::dissolve_released_pools() {
  bool any = false;
  for (auto pool = pools_.begin(); pool != pools_.end();) {
    const PrivatePool& p = pool->second;
    const bool ripe = p.users == 0 && std::all_of(p.until.begin(), p.until.end(),
                                                  [](const Stamp& s) { return s.complete(); });
    if (!ripe) {
      ++pool;
      continue;
    }
    bool gone = true;
    std::vector<HeapSet*> sets;
    for (const auto& [key, set] : sets_) {
      if (key.pool == pool->first) sets.push_back(set.get());
    }
    for (HeapSet* set : sets) {
      if (dissolve(*set)) {
        any = true;
        if (last_set_ == set) last_set_ = nullptr;
        sets_.erase({set->pool, set->timeline->stream().ref.id});
      } else {
        gone = false;  // blocks of it are still live; again when they are freed
      }
    }
    pool = gone ? pools_.erase(pool) : std::next(pool);
  }
  return any;
}

// Unmaps the dormant aliases that others' handles have left in a heap, as far as they are complete.
void DeviceAllocator::drop_aliases_in(Heap& heap) {
  std::vector<Unmap> unmaps;
  for (Region* region : heap.regions()) {
    for (DeviceAddr a = region->range.begin; a < region->mapped_end;) {
      Mapping* m = region->mapping_at(a);
      a = m == nullptr ? DeviceAddr{a.n / kPage.n * kPage.n} + kPage : m->end();
      if (m != nullptr && !m->is_home() && m->last_use.complete()) drop_alias(m, unmaps);
    }
  }
  const std::size_t dropped = unmaps.size();
  {
    const MutexUnlock driver_only(mu_);
    (void)unmap_all(unmaps);
  }
  books_.stats.paths.aliases_dropped += dropped - unmaps.size();
  restore(unmaps);
}

// Programs make streams and throw them away. What such a stream's heap set holds is reachable for
// others, but the set itself would stay for ever, with its addresses: sets whose work is complete and
// that have nothing in use are taken apart. A stream that lives on gets a new one.
void DeviceAllocator::dissolve_settled_streams(const HeapSet& keep) {
  if (temporary_sets_ <= temporary_limit_) return;
  const std::vector<HeapSet*> sets =
      default_sets_;  // erased only under work_mu_, so by nobody else
  for (HeapSet* set : sets) {
    Timeline& line = *set->timeline;
    if (set == &keep || line.stream().permanent || !line.is_settled()) continue;
    if (!dissolve(*set)) continue;
    if (last_set_ == set) last_set_ = nullptr;
    std::erase(default_sets_, set);
    --temporary_sets_;
    sets_.erase({kDefaultPool, line.stream().ref.id});
    if (line.is_settled()) {
      line.set_listed(false);
      std::erase(timeline_list_, &line);
    }
  }
  temporary_limit_ = 2 * temporary_sets_ + kTemporarySets;
}

void DeviceAllocator::note_stream(const StreamInfo& stream) {
  MutexLock lock(mu_);
  (void)timeline(stream);
}

// Takes what is idle away from a heap set. True when nothing is left of it.
bool DeviceAllocator::dissolve(HeapSet& set) {
  bool gone = true;
  for (auto& heap : set.heaps) {
    if (heap == nullptr) continue;
    std::vector<Handle*> idle;
    for (Region* region : heap->regions()) {
      for (DeviceAddr a = region->range.begin; a < region->mapped_end;) {
        Mapping* m = region->mapping_at(a);
        if (m == nullptr) {
          a = DeviceAddr{a.n / kPage.n * kPage.n} + kPage;
          continue;
        }
        a = m->end();
        // Freed after the release: complete only when its own stream says so.
        if (m->is_home() && m->uses == 0 && m->last_use.complete()) idle.push_back(m->handle);
      }
    }
    for (Handle* handle : idle) {
      // The books were open meanwhile; in a pool that is still in use somebody may have taken it.
      if (handle->home == nullptr || handle->home->heap != heap.get() || handle->busy()) continue;
      if (is_plain(heap->kind())) {
        if (captures_.load() > 0 || !release_plain(handle)) gone = false;
        continue;
      }
      Heap::leave_home(handle);
      if (handle->idle_list != nullptr) handle->idle_list->remove(handle);
      handle->pinned = false;
      handle->last_use = {};
      std::vector<Unmap> unmaps;
      for (Mapping* m = handle->aliases; m != nullptr;) {
        Mapping* next = m->next_alias;
        if (m->heap == heap.get()) drop_alias(m, unmaps);
        m = next;
      }
      {
        const MutexUnlock driver_only(mu_);
        (void)unmap_all(unmaps);
      }
      restore(unmaps);
      books_.handles.loose().push(handle);
    }
    drop_aliases_in(*heap);
    if (!heap->empty()) {
      gone = false;
    } else {
      heap->close();
      heap.reset();
    }
  }
  return gone;
}

}  // namespace gpumemx
