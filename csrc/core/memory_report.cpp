// SPDX-License-Identifier: BSD-3-Clause
#include "core/memory_report.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_set>

#include "core/allocator.hpp"

namespace gpumemx {

namespace {

void add(std::vector<StreamShare>& shares, StreamRef stream, Bytes bytes) {
  const auto same = std::find_if(shares.begin(), shares.end(),
                                 [&](const StreamShare& s) { return s.stream == stream; });
  if (same != shares.end()) {
    same->bytes += bytes;
  } else {
    shares.push_back({stream, bytes});
  }
}

}  // namespace

// The mappings that blocks of the caller, or of a request under way, stand on.
class DeviceAllocator::MappingsInUse {
 public:
  explicit MappingsInUse(const DeviceAllocator& allocator) GPUMEMX_REQUIRES(allocator.mu_) {
    for (const auto& [key, set] : allocator.sets_) {
      for (const auto& heap : set->heaps) {
        if (heap == nullptr) continue;
        for (const Region* region : heap->regions()) add_blocks_of(*region);
      }
    }
  }
  bool has(const Mapping* mapping) const { return mappings_.contains(mapping); }

 private:
  void add_blocks_of(const Region& region) {
    const Mapping* last = nullptr;
    for (const Block* b = region.first; b != nullptr; b = b->next) {
      if (b->state != BlockState::kLive && b->state != BlockState::kFilling) continue;
      for (DeviceAddr a = b->begin; a < b->end();) {
        const Mapping* m = region.mapping_at(a);
        if (m == nullptr) {  // being filled: no memory there yet
          a = round_down_to_page(a) + kPage;
          continue;
        }
        if (m != last) mappings_.insert(last = m);
        a = m->end();
      }
    }
  }
  static DeviceAddr round_down_to_page(DeviceAddr a) { return {a.n / kPage.n * kPage.n}; }

  std::unordered_set<const Mapping*> mappings_;
};

// What trim_cache() gives back if nobody allocates or frees meanwhile. Follows it step by step, and the
// tests hold the two to the same figure.
Bytes DeviceAllocator::releasable(bool wait) const {
  const bool captures = captures_.load() > 0;
  const bool waits = wait && !captures;
  const auto is_done = [&](const Stamp& stamp) { return waits || stamp.complete(); };
  // Blocks that are pending on streams are free after a wait.
  std::optional<MappingsInUse> in_use;
  if (waits && !pending_.empty()) in_use.emplace(*this);
  const auto is_used = [&](const Mapping& m) { return in_use ? in_use->has(&m) : m.uses != 0; };
  const auto is_dropped = [&](const Handle& h) {  // with all its mappings
    for (const Mapping* m = h.aliases; m != nullptr; m = m->next_alias) {
      if (!is_done(m->last_use)) return false;
    }
    return true;
  };
  std::map<PoolId, const PrivatePool*> dissolving;
  for (const auto& [id, pool] : pools_) {
    if (pool.users == 0 && std::all_of(pool.until.begin(), pool.until.end(), is_done)) {
      dissolving[id] = &pool;
    }
  }
  const auto goes_with_its_pool = [&](const Handle& h, const HeapSet& set) {
    const auto found = dissolving.find(set.pool);
    if (found == dissolving.end()) return false;
    const PrivatePool& pool = *found->second;
    if (h.kept && captures) return false;
    const Stamp& used = h.home->last_use;
    return is_done(used) ||
           std::any_of(pool.before.begin(), pool.before.end(), [&](const Stamp& last) {
             return last.timeline == used.timeline && used.epoch <= last.epoch;
           });
  };
  Bytes bytes;
  books_.handles.for_each([&](const Handle* h) {
    if (h->home == nullptr) {
      if (h->idle_list != nullptr && is_done(h->last_use) && is_dropped(*h)) bytes += h->size();
      return;
    }
    const Heap& heap = *h->home->heap;
    const HeapSet& set = heap.set();
    if (is_used(*h->home) || (is_plain(heap.kind()) && captures)) return;
    if (set.is_private) {
      if (!goes_with_its_pool(*h, set)) return;
      // The uses at its place end with the pool, those at others do not.
      for (const Mapping* m = h->aliases; m != nullptr; m = m->next_alias) {
        if (m->heap != &heap && !is_done(m->last_use)) return;
      }
    } else if (is_plain(heap.kind())) {
      if (!is_done(h->home->last_use)) return;
    } else if (h->pinned || !is_done(h->last_use) || !is_dropped(*h)) {
      return;
    }
    bytes += h->size();
  });
  for (const Handle* h : doomed_) bytes += h->size();
  return bytes;
}

void DeviceAllocator::add_causes(MemoryReport& report) const {
  for (const PendingBlock& pending : pending_) {
    const auto open = std::find_if(pending.until.begin(), pending.until.end(),
                                   [](const Stamp& s) { return !s.complete(); });
    const Stamp& stamp = open == pending.until.end() ? pending.until.front() : *open;
    add(report.pending_on, stamp.timeline->stream().ref, pending.block->size);
  }
  for_each_waiting([&](const Stamp& last_use, Bytes size) {
    add(report.waiting_on, last_use.timeline->stream().ref, size);
  });

  const MappingsInUse in_use(*this);
  std::map<PoolId, PoolShare> pools;
  const auto add_held = [&](const Block& b) {
    const auto holder = [&](const Mapping* m) -> Bytes& {
      return in_use.has(m) ? report.held_by.live : report.held_by.pending;
    };
    const Mapping* low = b.region->mapping_at(b.begin);
    const Mapping* high = b.region->mapping_at(b.end() - kGranule);
    if (low == high) {
      holder(low) += b.held;
      return;
    }
    if (low->begin < b.begin) holder(low) += low->end() - b.begin;
    if (high->end() > b.end()) holder(high) += b.end() - high->begin;
  };
  for (const auto& [key, set] : sets_) {
    PoolShare* pool = nullptr;
    if (set->is_private) {
      pool = &pools[set->pool];
      pool->pool = set->pool;
      const auto known = pools_.find(set->pool);
      pool->users = known == pools_.end() ? 0 : known->second.users;
    }
    for (const auto& heap : set->heaps) {
      if (heap == nullptr) continue;
      for (const Region* region : heap->regions()) {
        for (const Block* b = region->first; b != nullptr; b = b->next) {
          if (b->state == BlockState::kVoid) continue;
          if (pool != nullptr) {
            pool->reserved += b->size;
            if (b->state == BlockState::kLive) pool->live += b->size;
            if (b->state == BlockState::kReady) report.held_by.pools += b->size;
          } else if (b->state == BlockState::kReady && b->held.n != 0) {
            add_held(*b);
          }
        }
      }
    }
  }
  for (const auto& [id, pool] : pools) report.pools.push_back(pool);
}

MemoryReport DeviceAllocator::memory_report() {
  MemoryReport report;
  if (shut_down_) return report;
  const RelaxedCapture relaxed(driver_);
  std::optional<DeviceMemory> memory;
  close_epochs();  // else what was freed last would look unfinished for ever
  const MutexLock work(work_mu_);
  poll();
  if (const auto m = driver_.memory(); m.ok()) memory = m.value();
  const MutexLock lock(mu_);
  const AllFronts closed(*this);
  report.figures = read_figures();
  add_device(report.figures, memory);
  add_causes(report);
  report.releasable = releasable(/*wait=*/false);
  report.releasable_by_waiting = releasable(/*wait=*/true);
  return report;
}

std::vector<AddrRange> DeviceAllocator::address_ranges() const {
  const MutexLock work(work_mu_);
  const MutexLock lock(mu_);
  std::vector<AddrRange> ranges;
  if (addresses_.size.n != 0) ranges.push_back(addresses_);
  for (const auto& [key, set] : sets_) {
    for (const HeapKind kind : {HeapKind::kPlainSmall, HeapKind::kPlainLarge}) {
      const Heap* heap = set->heap_if_any(kind);
      if (heap == nullptr) continue;
      for (const Region* region : heap->regions()) ranges.push_back(region->range);
    }
  }
  for (const auto& [address, import] : imports_) ranges.push_back(import.range);
  return ranges;
}

}  // namespace gpumemx
