// SPDX-License-Identifier: BSD-3-Clause
//
// Looking at the books: figures of the whole device, the blocks one by one, and whether it all fits
// together.
#include <algorithm>

#include "core/allocator.hpp"

namespace gpumemx {

namespace {

template <class Visit>
void for_each_block(const HeapSet& set, Visit visit) {
  for (const auto& heap : set.heaps) {
    if (heap == nullptr) continue;
    for (const Region* region : heap->regions()) {
      for (const Block* b = region->first; b != nullptr; b = b->next) visit(*b);
    }
  }
}

Bytes current(const StatArray& stat) { return {static_cast<std::uint64_t>(stat.all().current)}; }

BlockInfo describe(const Block& b) {
  const HeapSet& set = b.heap->set();
  return {b.begin,
          b.size,
          b.use.requested,
          b.state,
          set.timeline->stream().ref,
          set.pool,
          b.heap->kind(),
          b.region->plain ? b.region->range.begin : DeviceAddr{},
          b.use.tag,
          b.use.context};
}

// Cuts the blocks of a region, by address, into segments.
class LayoutWriter {
 public:
  LayoutWriter(MemoryLayout& out, const Region& region) : out_(out), region_(region) {}

  void add(const Block& b) {
    if (b.state == BlockState::kVoid) {
      open_ = false;
    } else if (b.state == BlockState::kFilling) {
      add_filling(b);
    } else {
      if (b.state != BlockState::kReady) out_.active += b.size;
      append(describe(b));
    }
  }

 private:
  // The driver is at work there: memory stands behind some pages.
  void add_filling(const Block& b) {
    BlockInfo part = describe(b);
    part.state = BlockState::kReady;
    for (DeviceAddr a = b.begin; a < b.end();) {
      const Mapping* m = region_.mapping_at(a);
      const DeviceAddr page_end{a.n / kPage.n * kPage.n + kPage.n};
      const bool has_memory = m != nullptr && m->is_home();
      const DeviceAddr to = std::min(b.end(), has_memory ? m->end() : page_end);
      if (has_memory) {
        part.address = a;
        part.size = to - a;
        append(part);
      } else {
        open_ = false;
      }
      a = to;
    }
  }

  void append(BlockInfo block) {
    if (!open_) {
      const Mapping* m = region_.mapping_at(block.address);
      out_.segments.push_back({{block.address, {}},
                               block.stream,
                               block.pool,
                               block.heap,
                               region_.serial,
                               m == nullptr ? nullptr : m->handle->context,
                               out_.blocks.size(),
                               0});
      open_ = true;
    }
    SegmentInfo& segment = out_.segments.back();
    segment.range.size += block.size;
    ++segment.count;
    out_.blocks.push_back(std::move(block));
  }

  MemoryLayout& out_;
  const Region& region_;
  bool open_ = false;  // the next block goes on where the last one ended
};

}  // namespace

// Everything that the books know.
MemoryFigures DeviceAllocator::figures() const {
  const AllFronts closed(*this);
  return read_figures();
}

// What is idle, and its last use not known complete.
void DeviceAllocator::for_each_waiting(
    const std::function<void(const Stamp& last_use, Bytes size)>& visit) const {
  const auto look = [&](const IdleList& list) {
    list.for_each([&](const Handle* h) {
      if (!h->last_use.complete()) visit(h->last_use, h->size());
    });
  };
  look(books_.handles.loose());
  for (const HeapSet* set : default_sets_) {
    look(set->idle);
    for (const HeapKind kind : {HeapKind::kPlainSmall, HeapKind::kPlainLarge}) {
      const Heap* heap = set->heap_if_any(kind);
      if (heap == nullptr) continue;
      for (const Region* region : heap->regions()) {  // segments wait in no list
        const Mapping* segment = region->mapping_at(region->range.begin);
        if (segment->uses == 0 && !segment->last_use.complete()) {
          visit(segment->last_use, segment->size());
        }
      }
    }
  }
}

MemoryFigures DeviceAllocator::read_figures() const {
  const Stats& stats = books_.stats;
  MemoryFigures v;
  v.cap = cap();
  v.reserved = current(stats.reserved_bytes);
  v.live = current(stats.allocated_bytes);
  v.pending = current(stats.active_bytes) - v.live;
  v.held = current(stats.inactive_split_bytes);
  v.live_requested = current(stats.requested_bytes);
  for (const PendingBlock& p : pending_) v.live_requested -= p.block->use.requested;
  Bytes filling;
  for (const auto& entry : sets_) {
    const HeapSet* set = entry.second.get();
    for_each_block(*set, [&](const Block& b) {
      if (b.state == BlockState::kFilling) filling += b.size;
      if (b.state == BlockState::kReady) {
        v.largest_free = std::max(v.largest_free, b.size);
        if (set->is_private) v.idle_private += b.size - b.held;
      }
      if (set->is_private && b.state != BlockState::kVoid) v.in_private_pools += b.size;
    });
  }
  for_each_waiting([&](const Stamp&, Bytes size) { v.idle_pending += size; });
  // A request of another thread that is inside the driver right now counts as live.
  const Bytes accounted = v.live + v.pending + v.held + v.idle_private + v.idle_pending;
  const Bytes rest = v.reserved - std::min(v.reserved, accounted);
  const Bytes in_flight = std::min(filling, rest);
  v.live += in_flight;
  v.live_requested += in_flight;
  v.idle = rest - in_flight;
  return v;
}

void DeviceAllocator::add_device(MemoryFigures& v,
                                 const std::optional<DeviceMemory>& memory) const {
  // Asked a moment apart from the books, so the two can contradict each other.
  if (!memory || memory->total < memory->free + v.reserved) return;
  v.device_known = true;
  v.device_total = memory->total;
  v.device_free = memory->free;
  v.others = memory->total - memory->free - v.reserved;
}

MemoryFigures DeviceAllocator::memory_figures() {
  std::optional<DeviceMemory> memory;
  if (!shut_down_) {
    if (const auto m = driver_.memory(); m.ok()) memory = m.value();
  }
  MutexLock lock(mu_);
  MemoryFigures v = figures();
  add_device(v, memory);
  return v;
}

Bytes DeviceAllocator::take_interval_peak() {
  MutexLock lock(mu_);
  count_on(nullptr);
  const Bytes peak = interval_peak_;
  interval_peak_ = current(books_.stats.allocated_bytes);
  return peak;
}

bool DeviceAllocator::owns(DeviceAddr address) const {
  if (addresses_.contains(address)) return true;
  MutexLock lock(mu_);  // plain memory may lie anywhere
  return books_.arena.region_of(address) != nullptr;
}

std::optional<AddrRange> DeviceAllocator::segment_of(DeviceAddr address) const {
  MutexLock lock(mu_);
  const Region* region = books_.arena.region_of(address);
  if (region == nullptr) return std::nullopt;
  if (region->plain) return region->range;
  const Block* first = region->block_covering(address, books_.blocks);
  if (first->state == BlockState::kVoid) return std::nullopt;
  const Block* last = first;
  const auto has_memory = [](const Block* b) {
    return b != nullptr && b->state != BlockState::kVoid;
  };
  while (has_memory(first->prev)) first = first->prev;
  while (has_memory(last->next)) last = last->next;
  return AddrRange{first->begin, last->end() - first->begin};
}

std::optional<BlockMemory> DeviceAllocator::memory_behind(DeviceAddr address) const {
  MutexLock lock(mu_);
  const AllFronts closed(*this);
  const Region* region = books_.arena.region_of(address);
  if (region == nullptr) return std::nullopt;
  const Block* block = region->block_covering(address, books_.blocks);
  if (block == nullptr || block->state != BlockState::kLive) return std::nullopt;
  BlockMemory memory{{block->begin, block->size}, {}, region->plain, false};
  if (region->plain) {
    memory.handles.push_back(region->range);
    return memory;
  }
  memory.exportable = driver_.traits().exportable;
  for (DeviceAddr a = block->begin; a < block->end(); a = memory.handles.back().end()) {
    const Mapping* mapping = region->mapping_at(a);
    memory.handles.push_back({mapping->begin, mapping->size()});
  }
  return memory;
}

Bytes DeviceAllocator::largest_cached() const {
  MutexLock lock(mu_);
  const AllFronts closed(*this);
  // Idle handles can be mapped side by side: together they are one block.
  Bytes movable = books_.handles.loose().bytes();
  for (const HeapSet* set : default_sets_) movable += set->idle.bytes();
  Bytes largest = movable;
  for (const auto& [key, set] : sets_) {
    for (const auto& heap : set->heaps) {
      if (heap == nullptr) continue;
      const FreeIndex& free = heap->free();
      for (const Block* b = free.first_from(0); b != nullptr; b = free.after(b)) {
        largest = std::max(largest, b->size);
      }
    }
  }
  return largest;
}

std::vector<BlockInfo> DeviceAllocator::blocks() const {
  MutexLock lock(mu_);
  const AllFronts closed(*this);
  std::vector<BlockInfo> out;
  for (const auto& [key, set] : sets_) {
    for_each_block(*set, [&](const Block& b) {
      if (b.state != BlockState::kVoid) out.push_back(describe(b));
    });
  }
  std::sort(out.begin(), out.end(),
            [](const BlockInfo& a, const BlockInfo& b) { return a.address < b.address; });
  return out;
}

void DeviceAllocator::gather_layout(std::optional<PoolId> pool, MemoryLayout& out) const {
  const AllFronts closed(*this);
  for (const auto& [key, set] : sets_) {
    if (pool && set->pool != *pool) continue;
    for (const auto& heap : set->heaps) {
      if (heap == nullptr) continue;
      for (const Region* region : heap->regions()) {
        LayoutWriter writer(out, *region);
        for (const Block* b = region->first; b != nullptr; b = b->next) writer.add(*b);
      }
    }
  }
  out.events = books_.history.end();
}

MemoryLayout DeviceAllocator::layout(std::optional<PoolId> pool) const {
  MemoryLayout out;
  // Room for most of it is made without the lock; a free block for every two in use is typical.
  const auto active = static_cast<std::size_t>(stats().active.all().current);
  out.blocks.reserve(active + active / 2 + 64);
  {
    MutexLock lock(mu_);
    gather_layout(pool, out);
  }
  std::sort(
      out.segments.begin(), out.segments.end(),
      [](const SegmentInfo& a, const SegmentInfo& b) { return a.range.begin < b.range.begin; });
  return out;
}

void DeviceAllocator::note_snapshot(Bytes active, PoolId pool) {
  MutexLock lock(mu_);
  if (books_.history.on()) books_.history.push({EventKind::kSnapshot, {}, active, {}, pool});
}

void DeviceAllocator::record_history(std::size_t capacity, History::Clock clock,
                                     const HistoryRules& rules, bool keep) {
  History history;
  history.reset(capacity, clock, rules);
  MutexLock lock(mu_);  // given back before what `history` holds in the end is dropped
  if (keep && capacity != 0 && books_.history.recording()) {
    books_.history.change(capacity, clock, rules);
  } else {
    books_.history.exchange(history);
  }
  note_history();
}

// For the gate: events are written with the books locked. Nobody is on the short way any more, if the
// history is on now, when this returns.
void DeviceAllocator::note_history() {
  if (note_reason(history_is_on_, books_.history.on())) unpark_all();
}

std::vector<HistoryEvent> DeviceAllocator::history(std::uint64_t until) const {
  constexpr std::uint64_t kSlice = 4096;
  std::vector<HistoryEvent> out;
  std::uint64_t next = 0;
  for (bool first = true;; first = false) {
    std::uint64_t left = 0;
    {
      MutexLock lock(mu_);
      const History& history = books_.history;
      next = std::max(next, history.begin());
      until = std::min(until, history.end());
      if (next >= until) return out;
      left = until - next;
      // The first time only the length is found out: room is made without the lock.
      const std::uint64_t to = first ? next : next + std::min(left, kSlice);
      for (; next < to; ++next) out.push_back(history.events()[next - history.begin()]);
    }
    if (first) out.reserve(left);
  }
}

void DeviceAllocator::listen(HistoryListener* listener, History::Clock clock) {
  MutexLock lock(mu_);
  books_.history.set_listener(listener, clock);
  note_history();
}

bool DeviceAllocator::annotate(DeviceAddr address) {
  MutexLock lock(mu_);
  const Block* b = books_.arena.find(address, books_.blocks);
  if (b == nullptr || b->state != BlockState::kLive) return false;
  const FrontLock own(b->front.load(std::memory_order_relaxed));
  if (b->parked) return false;
  if (books_.history.on()) note(EventKind::kAnnotate, *b);
  return true;
}

std::optional<BlockInfo> DeviceAllocator::find_block(DeviceAddr address) const {
  MutexLock lock(mu_);
  const Block* b = books_.arena.find(address, books_.blocks);
  if (b == nullptr || b->state != BlockState::kLive) return std::nullopt;
  const FrontLock own(b->front.load(std::memory_order_relaxed));
  if (b->parked) return std::nullopt;
  return describe(*b);
}

std::optional<std::string> DeviceAllocator::validate() const {
  MutexLock lock(mu_);
  const AllFronts closed(*this);
  Bytes live, pending, held, requested;
  std::uint64_t live_count = 0;
  bool filling = false;
  for (const auto& [key, set] : sets_) {
    for (const auto& heap : set->heaps) {
      if (heap == nullptr) continue;
      if (auto broken = heap->validate()) return broken;
    }
    for_each_block(*set, [&](const Block& b) {
      switch (b.state) {
        case BlockState::kLive:
          live += b.size;
          requested += b.use.requested;
          ++live_count;
          break;
        case BlockState::kPending:
          pending += b.size;
          requested += b.use.requested;
          break;
        case BlockState::kReady: held += b.held; break;
        case BlockState::kFilling: filling = true; break;
        case BlockState::kVoid: break;
      }
    });
  }
  const Stats& s = books_.stats;
  if (live != current(s.allocated_bytes)) return "allocated_bytes is not the sum of live blocks";
  if (live_count != static_cast<std::uint64_t>(s.allocation.all().current)) {
    return "the allocation count is not the number of live blocks";
  }
  if (live + pending != current(s.active_bytes)) return "active_bytes is not live + pending";
  if (requested != current(s.requested_bytes)) return "requested_bytes is not the sum of requests";
  if (held != current(s.inactive_split_bytes)) return "inactive_split_bytes is not the held bytes";

  Bytes reserved, idle;
  std::map<PoolId, Bytes> in_pools;
  std::uint64_t dormant = 0;
  const char* broken = nullptr;
  books_.handles.for_each([&](const Handle* h) {
    reserved += h->size();
    if (!h->busy()) idle += h->size();
    if (h->home != nullptr && h->home->heap->set().is_private) {
      in_pools[h->home->heap->set().pool] += h->size();
    }
    std::uint32_t aliases = 0;
    for (const Mapping* m = h->aliases; m != nullptr; m = m->next_alias) {
      ++aliases;
      if (m->is_home()) continue;
      ++dormant;
      if (m->uses != 0) broken = "a dormant alias is in use";
    }
    if (aliases != h->alias_count) broken = "alias_count is not the number of mappings";
    if (h->busy() && h->idle_list != nullptr) broken = "(5) a handle is idle and in use";
  });
  if (broken != nullptr) return broken;
  // While a request is inside the driver, what it works on is not in these sums.
  if (filling) return std::nullopt;
  for (const auto& [pool, bytes] : books_.reserved_by_pool) {
    if (current(bytes) != in_pools[pool]) return "a pool's reserved bytes are not its handles";
  }
  if (dormant != s.dormant_aliases) return "the count of dormant aliases is wrong";
  if (reserved != current(s.reserved_bytes)) return "reserved_bytes is not the sum of the handles";
  if (live + pending + held + idle != reserved)
    return "reserved is not live + pending + held + idle";
  for (const StatArray* a :
       {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes,
        &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes}) {
    const auto now = [&](int part) { return a->part[static_cast<std::size_t>(part)].current; };
    if (now(0) != now(1) + now(2)) return "small and large do not add up to all";
    for (const Stat& stat : a->part) {
      if (stat.current < 0 || stat.current > stat.peak)
        return "a figure is negative or above its peak";
      if (stat.allocated - stat.freed() > stat.peak) return "allocated - freed is above the peak";
    }
  }
  return std::nullopt;
}

DeviceAllocator::~DeviceAllocator() {
  if (shut_down_) {
    books_.arena.abandon();
    return;
  }
  const RelaxedCapture relaxed(driver_);
  (void)hand_back_segments();
  drop_imports();
  close_epochs();  // frees without an event yet: their work may still run
  // Nobody else is here any more; the driver's answers do not matter: it is the end either way.
  std::vector<EventId> events;
  for (Timeline* line : timeline_list_) {
    while (line->has_fences()) {
      events.push_back(line->oldest().event);
      line->drop_oldest();
    }
  }
  for (const EventId event : events) {
    (void)driver_.wait(event);
    driver_.recycle(event);
  }
  books_.handles.for_each([&](Handle* h) {
    if (h->driver == HandleId{}) {
      if (SegmentSource* source = h->home->heap->set().source.get()) {
        source->free(h->home->begin);
      } else {
        (void)driver_.free(h->home->begin);
      }
      return;
    }
    for (const Mapping* m = h->aliases; m != nullptr; m = m->next_alias) {
      (void)driver_.unmap({m->begin, h->size()});
    }
    (void)driver_.release(h->driver);
  });
}

}  // namespace gpumemx
