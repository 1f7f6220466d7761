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
  pools_[id].options = std::move(options);
  if (options_.plain_pools) pools_[id].options.plain = true;
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
    PrivatePool& p = found->second;
    if (--p.users > 0) return;
    if (p.use_on_oom) --overflow_pools_;
    p.use_on_oom = false;
    for (Timeline* line : timeline_list_) {
      // A temporary stream may be gone; its last event covers all that it did for us.
      if (!line->stream().permanent) {
        p.until.push_back({line, line->own_epochs()});
        p.before.push_back({line, line->epoch() - 1});
        continue;
      }
      const std::uint64_t epoch = line->advance();
      p.until.push_back({line, epoch});
      p.before.push_back({line, epoch});
      closed.emplace_back(line, epoch);
    }
    if (planted(Fault::kPoolDissolvedEarly)) found->second.until.clear();
    if (!any_pool_is_in_use()) (void)keep_no_longer();
  }
  for (const auto& [line, epoch] : closed) record_fence(*line, epoch);
}

// --- memory of a released pool that a capture has used and that was freed before its end
//
// The graph goes on using it at each replay, and torch's own allocator leaves it where it is. So it stays
// in place here too, until the cache is emptied, memory is short or no pool is in use any more.

bool DeviceAllocator::any_pool_is_in_use() const {
  return std::any_of(pools_.begin(), pools_.end(),
                     [](const auto& entry) { return entry.second.users > 0; });
}

void DeviceAllocator::keep_in_place(const Block& block) {
  const HeapSet& set = block.heap->set();
  if (!set.is_private || !any_pool_is_in_use()) return;
  const auto pool = pools_.find(set.pool);
  if (pool != pools_.end() && pool->second.users > 0) return;  // its memory stays anyway
  for (DeviceAddr a = block.begin; a < block.end();) {
    const Mapping* m = block.region->mapping_at(a);
    a = m->end();
    Handle* handle = m->handle;
    if (handle->kept) continue;
    handle->kept = true;
    kept_.push_back(handle->id);
  }
}

bool DeviceAllocator::keep_no_longer() {
  const bool any = !kept_.empty();
  for (const std::uint32_t id : kept_) {
    Handle* handle = books_.handles.find(id);
    if (handle != nullptr) handle->kept = false;
  }
  kept_.clear();
  return any;
}

template <class Visit>
void DeviceAllocator::for_each_block_of(PoolId pool, Visit visit) const {
  for (const auto& [key, set] : sets_) {
    if (key.pool != pool) continue;
    for (const auto& heap : set->heaps) {
      if (heap == nullptr) continue;
      for (const Region* region : heap->regions()) {
        for (const Block* b = region->first; b != nullptr; b = b->next) visit(*b);
      }
    }
  }
}

std::optional<PoolInfo> DeviceAllocator::pool_info(PoolId pool) const {
  MutexLock lock(mu_);
  const auto found = pools_.find(pool);
  if (found == pools_.end()) return std::nullopt;
  PoolInfo info{found->second.users, {}, {}};
  for_each_block_of(pool, [&](const Block& b) {
    if (b.state != BlockState::kVoid) info.reserved += b.size;
    if (b.state == BlockState::kLive) info.live += b.size;
  });
  return info;
}

void DeviceAllocator::set_plain(PoolId pool) {
  const MutexLock work(work_mu_);  // memory that is being mapped for the pool comes before this
  const MutexLock lock(mu_);
  const auto found = pools_.find(pool);
  GPUMEMX_CHECK(found != pools_.end(), "set_plain() of a pool that does not exist");
  found->second.options.plain = true;
  for (const auto& [key, set] : sets_) {
    if (key.pool == pool) set->plain = true;
  }
}

void DeviceAllocator::set_whole(PoolId pool) {
  MutexLock lock(mu_);
  const auto found = pools_.find(pool);
  GPUMEMX_CHECK(found != pools_.end(), "set_whole() of a pool that does not exist");
  found->second.options.whole = true;
  for (const auto& [key, set] : sets_) {
    if (key.pool == pool) set->whole = set->plain = true;
  }
}

void DeviceAllocator::set_use_on_oom(PoolId pool, bool use) {
  MutexLock lock(mu_);
  const auto found = pools_.find(pool);
  GPUMEMX_CHECK(found != pools_.end(), "set_use_on_oom() of a pool that does not exist");
  PrivatePool& p = found->second;
  if (p.users == 0 || p.use_on_oom == use) return;
  p.use_on_oom = use;
  overflow_pools_ += use ? 1 : -1;
}

Block* DeviceAllocator::take_from_overflow_pools(const AllocRequest& request, Bytes size) {
  if (overflow_pools_ == 0 || request.pool != kDefaultPool) return nullptr;
  for (const auto& [id, pool] : pools_) {
    if (!pool.use_on_oom) continue;
    const auto found = sets_.find({id, request.stream.ref.id});
    if (found == sets_.end()) continue;
    if (Block* block = take_hit(*found->second, size, HitWaste::kAny)) return block;
  }
  return nullptr;
}

// --- a third party's memory

std::shared_ptr<SegmentSource> DeviceAllocator::source_of(PoolId pool) const {
  if (pool == kDefaultPool) return nullptr;
  MutexLock lock(mu_);
  const auto found = pools_.find(pool);
  GPUMEMX_CHECK(found != pools_.end(), "a request names a private pool that does not exist");
  return found->second.options.source;
}

// A miss in a pool that has a source of its own. The source is asked without any lock.
AllocResult DeviceAllocator::allocate_from_source(SegmentSource& source,
                                                  const AllocRequest& request, Bytes size) {
  std::optional<Error> error;
  Effort effort;
  bool is_usual = true, fitted = false, gave_back = false;
  for (;;) {
    Bytes segment = round_up(size, kPage);
    bool fits = false;
    {
      const MutexLock work(work_mu_);
      poll();
      const MutexLock lock(mu_);
      HeapSet& set = heap_set(request.stream, request.pool);
      if (Block* block = take_hit(set, size, HitWaste::kAny)) {
        ++books_.stats.paths.hits;
        return hand_out(block, request);
      }
      if (is_usual && !set.whole) {
        segment = plain_segment_size(size, heap_kind(size, true, options_));
      }
      fits = reserved() + segment <= cap();
    }
    if (fits) {
      const auto got = source.allocate(segment);
      if (got.ok() && addresses_.contains(got.value())) {
        source.free(got.value());
        error = Error{Errc::kInvalidArgument, segment,
                      "the pool's allocator gave memory of this allocator instead of its own"};
        break;
      }
      if (got.ok()) {
        MutexLock lock(mu_);
        HeapSet& set = heap_set(request.stream, request.pool);
        Heap& heap = set.heap(heap_kind(size, true, options_), books_);
        Handle* handle = books_.handles.add(HandleId{}, Policy::pages(segment));
        handle->small = is_small(heap.kind());
        books_.stats.reserved_bytes.add(handle->small, segment.n);
        ++books_.stats.num_device_alloc;
        ++books_.stats.paths.misses;
        ++books_.stats.paths.plain_segments;
        heap.add_segment({got.value(), segment}, handle);
        const Bytes block = set.whole ? segment : size;
        return hand_out(heap.take(heap.regions().back()->first, got.value(), block), request);
      }
      error = got.error();
      if (error->code != Errc::kOutOfMemory) break;
    }
    // First the usual segment, then one as small as it can be, then that after giving back what is
    // cached here: it is of no use to the source unless the device has it.
    if (is_usual) {
      is_usual = false;
    } else if (!fits && !fitted) {
      fitted = true;
      release_idle_down_to(cap() > segment ? cap() - segment : Bytes{});
    } else if (fits && !gave_back) {
      gave_back = true;
      release_idle_down_to({});
    } else if (!make_room(request, effort)) {
      break;
    }
  }
  return fail(request, size, error);
}

// Gives back what is idle, after waiting for it, until reserved is at most `target`.
void DeviceAllocator::release_idle_down_to(Bytes target) {
  wait_for_idle_memory();
  {
    const MutexLock work(work_mu_);
    poll();
    const MutexLock lock(mu_);
    dissolve_released_pools();
    (void)release_idle(target);
    ++books_.stats.num_alloc_retries;
  }
  (void)hand_back_segments();
}

// Segments that are out of the books go to the third parties that made them. False if there are none.
bool DeviceAllocator::hand_back_segments() {
  if (!has_returned_.load(std::memory_order_relaxed)) return false;
  std::vector<Returned> returned;
  {
    MutexLock lock(mu_);
    returned.swap(returned_);
    has_returned_ = false;
  }
  const RelaxedCapture relaxed(driver_);  // they may well call cudaFree()
  for (const Returned& r : returned) r.source->free(r.address);
  return !returned.empty();
}

// --- checkpoints

PoolCheckpoint DeviceAllocator::checkpoint_pool(PoolId pool) const {
  MutexLock lock(mu_);
  PoolCheckpoint checkpoint{pool, {}};
  for_each_block_of(pool, [&](const Block& b) {
    if (b.state != BlockState::kLive) return;
    checkpoint.live.push_back({b.begin, b.size, b.use.requested, b.use.tag, b.use.context});
  });
  std::sort(checkpoint.live.begin(), checkpoint.live.end(),
            [](const auto& a, const auto& b) { return a.address < b.address; });
  return checkpoint;
}

// Whether all of the range has its memory in one region of the pool.
bool DeviceAllocator::stands_in(PoolId pool, DeviceAddr begin, Bytes size) const {
  const Region* region = books_.arena.region_of(begin);
  if (region == nullptr || region->heap->set().pool != pool) return false;
  if (begin + size > region->range.end()) return false;
  for (DeviceAddr a = begin; a < begin + size;) {
    const Mapping* m = region->mapping_at(a);
    if (m == nullptr || !m->is_home()) return false;
    a = m->end();
  }
  return true;
}

// The free block of the pool that has all of the range, or null.
Block* DeviceAllocator::ready_at(PoolId pool, DeviceAddr begin, Bytes size) {
  Region* region = books_.arena.region_of(begin);
  if (region == nullptr || region->heap->set().pool != pool) return nullptr;
  Block* block = region->block_covering(begin, books_.blocks);
  const bool has_it = block->state == BlockState::kReady && begin + size <= block->end();
  return has_it ? block : nullptr;
}

Result<RestoredPool> DeviceAllocator::restore_pool(const PoolCheckpoint& checkpoint) {
  const RelaxedCapture relaxed(driver_);
  const PoolId pool = checkpoint.pool;
  const auto& wanted = checkpoint.live;
  RestoredPool out;
  // Twice at most: a block that other streams still use becomes free when they are done.
  for (int attempt = 0;; ++attempt) {
    bool is_free = true;
    std::vector<ClosedEpoch> closed;
    {
      const MutexLock work(work_mu_);  // so that nobody is filling a block
      poll();
      const MutexLock lock(mu_);
      for (const auto& w : wanted) {
        if (!stands_in(pool, w.address, w.size)) {
          return Error{Errc::kInvalidArgument, w.size,
                       "the checkpoint is older than the pool's memory"};
        }
      }
      std::vector<DeviceAddr> live;
      for_each_block_of(pool, [&](const Block& b) {
        if (b.state == BlockState::kLive) live.push_back(b.begin);
      });
      if (attempt == 0) out.freed = live;
      std::vector<bool> is_kept(wanted.size(), false);
      for (const DeviceAddr address : live) {
        const Block* block = books_.arena.find(address, books_.blocks);
        const auto same =
            std::lower_bound(wanted.begin(), wanted.end(), address,
                             [](const auto& w, DeviceAddr a) { return w.address < a; });
        if (same != wanted.end() && same->address == address && same->size == block->size &&
            same->requested == block->use.requested) {
          is_kept[static_cast<std::size_t>(same - wanted.begin())] = true;
          continue;
        }
        ClosedEpoch own;
        (void)take_back(address, own, closed);
        if (own.line != nullptr) closed.push_back(own);
      }
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (!is_kept[i] && ready_at(pool, wanted[i].address, wanted[i].size) == nullptr) {
          is_free = false;
        }
      }
      for (std::size_t i = 0; is_free && i < wanted.size(); ++i) {
        const auto& w = wanted[i];
        out.allocated.push_back(w.address);
        if (is_kept[i]) continue;
        Block* ready = ready_at(pool, w.address, w.size);
        Block* block = ready->heap->take(ready, w.address, w.size);
        (void)hand_out(block, {w.requested, block->heap->set().timeline->stream(), pool, w.tag,
                               w.context.get()});
      }
    }
    for (const ClosedEpoch& c : closed) record_fence(*c.line, c.epoch, c.in_pool);
    if (is_free) return out;
    if (captures_.load() > 0 || attempt > 0) {
      return Error{Errc::kCaptureActive, {}, "streams still use memory that is to be live again"};
    }
    wait_for_idle_memory();
  }
}

// --- released pools

bool DeviceAllocator::dissolve_released_pools() {
  // A set that still has live blocks gives up what stands around them, too.
  const auto given = [&] {
    mu_.assert_held();
    return std::pair(reserved(), books_.handles.loose().bytes());
  };
  const auto before = given();
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
      if (dissolve(*set, &p)) {
        any = true;
        if (last_set_ == set) last_set_ = nullptr;
        sets_.erase({set->pool, set->timeline->stream().ref.id});
      } else {
        gone = false;  // blocks of it are still live; again when they are freed
      }
    }
    pool = gone ? pools_.erase(pool) : std::next(pool);
  }
  return any || given() != before;
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
    if (!dissolve(*set, nullptr)) continue;
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

// Takes what is idle away from a heap set, that of a released pool whose streams have all come so far
// or of a stream of its own. True when nothing is left of it.
bool DeviceAllocator::dissolve(HeapSet& set, const PrivatePool* pool) {
  bool gone = true;
  // Freed before the release: complete with the pool. After it: only when its own stream says so.
  const auto is_complete = [pool](const Stamp& stamp) {
    if (stamp.complete()) return true;
    return pool != nullptr &&
           std::any_of(pool->before.begin(), pool->before.end(), [&](const Stamp& last) {
             return last.timeline == stamp.timeline && stamp.epoch <= last.epoch;
           });
  };
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
        if (m->is_home() && m->uses == 0 && !m->handle->kept && is_complete(m->last_use)) {
          idle.push_back(m->handle);
        }
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
        if (m->heap == heap.get()) {
          // If the driver does not unmap it now, somebody can later: no event may ever tell its use's end.
          if (is_complete(m->last_use)) m->last_use = {};
          drop_alias(m, unmaps);
        }
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
