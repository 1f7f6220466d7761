// SPDX-License-Identifier: BSD-3-Clause
#include "core/heap.hpp"

#include <algorithm>

#include "base/check.hpp"
#include "core/planted.hpp"

namespace gpumemx {

namespace {

// The first region of a heap; later ones double what it has, so a heap has few of them.
constexpr Bytes kFirstRegion{4ull << 30};

}  // namespace

Heap& HeapSet::heap(HeapKind kind, Books& books) {
  auto& slot = heaps[static_cast<std::size_t>(kind)];
  if (slot == nullptr) slot = std::make_unique<Heap>(*this, kind, books);
  return *slot;
}

template <class Visit>
void Heap::for_each_mapping(const Block& block, Visit visit) const {
  for (DeviceAddr a = block.begin; a < block.end();) {
    Mapping* mapping = block.region->mapping_at(a);
    if (mapping == nullptr) {
      a = DeviceAddr{a.n / kPage.n * kPage.n} + kPage;  // only under kFilling
      continue;
    }
    a = mapping->end();
    visit(mapping);
  }
}

// --- blocks

Block* Heap::add_block(Region* region, DeviceAddr begin, Bytes size, BlockState state) {
  Block* block = books_.blocks.acquire();
  block->begin = begin;
  block->size = size;
  block->prev = block->next = nullptr;
  block->list_prev = block->list_next = nullptr;
  block->heap = this;
  block->region = region;
  block->held = {};
  block->state = state;
  region->add_begin(*block);
  return block;
}

Block* Heap::cut(Block* block, DeviceAddr at) {
  Block* upper = add_block(block->region, at, block->end() - at, block->state);
  block->size = at - block->begin;
  upper->prev = block;
  upper->next = block->next;
  (upper->next != nullptr ? upper->next->prev : block->region->last) = upper;
  block->next = upper;
  return upper;
}

void Heap::join(Block* lower, Block* upper) {
  lower->size += upper->size;
  lower->next = upper->next;
  (lower->next != nullptr ? lower->next->prev : lower->region->last) = lower;
  upper->region->remove_begin(*upper);
  books_.blocks.release(upper);
}

// Bytes of a kReady block whose handles are in use. Handles that lie wholly inside are idle; only
// those at its two ends can be shared, and a shared one is in use: were it idle, its other side
// would be free and ready too, and part of this block.
Bytes Heap::held_bytes(const Block& block) const {
  const Mapping* low = block.region->mapping_at(block.begin);
  const Mapping* high = block.region->mapping_at(block.end() - kGranule);
  const DeviceAddr idle_begin = low->begin == block.begin ? block.begin : low->end();
  const DeviceAddr idle_end = high->end() == block.end() ? block.end() : high->begin;
  return idle_begin < idle_end ? block.size - (idle_end - idle_begin) : block.size;
}

void Heap::link(Block* block) {
  free_.insert(block);
  if (block->state != BlockState::kReady) return;
  block->held = held_bytes(*block);
  if (block->held.n == 0) return;
  books_.stats.inactive_split.add(is_small(kind_), 1);
  books_.stats.inactive_split_bytes.add(is_small(kind_), block->held.n);
}

void Heap::unlink(Block* block) {
  free_.remove(block);
  if (block->state != BlockState::kReady || block->held.n == 0) return;
  books_.stats.inactive_split.sub(is_small(kind_), 1);
  books_.stats.inactive_split_bytes.sub(is_small(kind_), block->held.n);
}

Block* Heap::isolate(Block* block, DeviceAddr begin, DeviceAddr end) {
  unlink(block);
  if (begin > block->begin) {
    Block* upper = cut(block, begin);
    link(block);
    block = upper;
  }
  if (end < block->end()) {
    Block* rest = cut(block, end);
    if (planted(Fault::kRemainderOverlaps) && rest->size > kGranule &&
        rest->begin > begin + kGranule && block->state == BlockState::kReady) {
      rest->region->remove_begin(*rest);
      rest->begin = rest->begin - kGranule;
      rest->size += kGranule;
      rest->region->add_begin(*rest);
    }
    link(rest);
  }
  return block;
}

Block* Heap::merge(Block* block) {
  if (Block* lower = block->prev; lower != nullptr && lower->state == block->state) {
    unlink(lower);
    join(lower, block);
    block = lower;
  }
  if (Block* upper = block->next; upper != nullptr && upper->state == block->state) {
    unlink(upper);
    join(block, upper);
  }
  return block;
}

void Heap::set_free_state(Block* block, BlockState state) {
  block->state = state;
  link(merge(block));
}

// --- use of memory

void Heap::use(Block* block) {
  for_each_mapping(*block, [&](Mapping* mapping) {
    Handle* handle = mapping->handle;
    if (mapping->uses++ == 0 && handle->idle_list != nullptr) handle->idle_list->remove(handle);
  });
}

void Heap::unuse(Block* block, const Stamp* stamp) {
  // A block that was pending may have been freed before a neighbour on the same handle.
  const auto is_later = [](const Stamp& a, const Stamp& b) {
    return a.timeline != b.timeline || a.epoch > b.epoch;
  };
  for_each_mapping(*block, [&](Mapping* mapping) {
    if (stamp != nullptr && is_later(*stamp, mapping->last_use)) mapping->last_use = *stamp;
    if (--mapping->uses != 0) {
      if (planted(Fault::kHandleIdleWhileBusy) && !mapping->handle->pinned &&
          mapping->handle->idle_list == nullptr) {
        retire(mapping->handle);
      }
      return;
    }
    if (stamp != nullptr) mapping->handle->last_use = mapping->last_use;
    retire(mapping->handle);
  });
}

void Heap::retire(Handle* handle) {
  if (handle->pinned && !(planted(Fault::kPrivateHarvested) && set_.is_private)) return;
  handle->idle_since = books_.handles.next_serial();
  set_.idle.push(handle);
}

Block* Heap::take(Block* ready, DeviceAddr at, Bytes size) {
  Block* block = isolate(ready, at, at + size);
  block->state = BlockState::kLive;
  use(block);
  return block;
}

void Heap::give(Block* block, Stamp stamp) {
  unuse(block, &stamp);
  block->use.reset();
  block->front.store(nullptr, std::memory_order_relaxed);
  block->parked = false;
  block->shared = false;
  set_free_state(block, BlockState::kReady);
}

// --- addresses

bool Heap::open_end(Bytes size) {
  if (!regions_.empty()) {
    Region* region = regions_.back();
    const Block* last = region->last;
    if (last->state == BlockState::kVoid) {
      region->tighten_mapped_end(last->begin);
      // Dormant aliases may stand there still in use: only what lies beyond them serves for sure.
      if (std::max(region->mapped_end, last->begin) + size <= last->end()) return true;
    }
  }
  const Bytes need = round_up(size, kPage);
  Region* region = books_.arena.take(std::max({kFirstRegion, need * 2, addresses_}), this);
  if (region == nullptr) region = books_.arena.take(need, this);
  if (region == nullptr) return false;
  addresses_ += region->range.size;
  regions_.push_back(region);
  region->first = region->last =
      add_block(region, region->range.begin, region->range.size, BlockState::kVoid);
  link(region->first);
  return true;
}

void Heap::add_segment(AddrRange range, Handle* handle) {
  Region* region = books_.arena.add_plain(range, this);
  regions_.push_back(region);
  Mapping* mapping = books_.handles.add_mapping(handle, region, range.begin);
  handle->home = mapping;
  handle->pinned = true;
  region->set_mapping({range.begin, round_up(range.size, kPage)}, mapping);
  books_.stats.segment.add(handle->small, 1);
  count_in_pool(*handle, true);
  note(EventKind::kSegmentAlloc, range, *handle);
  region->first = region->last = add_block(region, range.begin, range.size, BlockState::kReady);
  link(region->first);
}

AddrRange Heap::drop_segment(Handle* handle) {
  Region* region = handle->home->region;
  const AddrRange range = region->range;
  unlink(region->first);
  region->remove_begin(*region->first);
  books_.blocks.release(region->first);
  note(EventKind::kSegmentFree, range, *handle);
  books_.stats.segment.sub(handle->small, 1);
  count_in_pool(*handle, false);
  books_.handles.remove_mapping(handle->home);
  handle->home = nullptr;
  std::erase(regions_, region);
  books_.arena.give_back(region);
  return range;
}

bool Heap::empty() const {
  return std::all_of(regions_.begin(), regions_.end(), [](const Region* region) {
    if (region->first != region->last || region->first->state != BlockState::kVoid) return false;
    for (DeviceAddr a = region->range.begin; a < region->mapped_end; a = a + kPage) {
      if (region->mapping_at(a) != nullptr) return false;
    }
    return true;
  });
}

void Heap::close() {
  for (Region* region : regions_) {
    unlink(region->first);
    region->remove_begin(*region->first);
    books_.blocks.release(region->first);
    books_.arena.give_back(region);
  }
  regions_.clear();
  addresses_ = {};
}

// --- memory comes and goes

// A segment, as torch sees it, is a contiguous run of pages that have their memory.
void Heap::segment_changed(Mapping* mapping, bool comes) {
  const auto home_at = [&](DeviceAddr a) {
    const Mapping* m = mapping_at(mapping->region, a);
    return m != nullptr && m->is_home() ? 1 : 0;
  };
  const int neighbours =
      (mapping->begin == mapping->region->range.begin ? 0 : home_at(mapping->begin - kPage)) +
      home_at(mapping->end());
  const int delta = comes ? 1 - neighbours : neighbours - 1;
  if (delta > 0) books_.stats.segment.add(is_small(kind_), static_cast<std::uint64_t>(delta));
  if (delta < 0) books_.stats.segment.sub(is_small(kind_), static_cast<std::uint64_t>(-delta));
  note(comes ? EventKind::kSegmentMap : EventKind::kSegmentUnmap, {mapping->begin, mapping->size()},
       *mapping->handle);
}

void Heap::note(EventKind kind, AddrRange range, Handle& memory) const {
  if (!books_.history.on()) return;
  const bool comes = kind == EventKind::kSegmentAlloc || kind == EventKind::kSegmentMap;
  if (comes) memory.context = current_context();
  books_.history.push({kind, range.begin, range.size, set_.timeline->stream().ref, set_.pool,
                       /*tag=*/0},
                      memory.context);
}

void Heap::count_in_pool(const Handle& handle, bool comes) {
  if (!set_.is_private) return;
  StatArray& reserved = books_.reserved_by_pool[set_.pool];
  if (comes) {
    reserved.add(handle.small, handle.size().n);
  } else {
    reserved.sub(handle.small, handle.size().n);
  }
}

void Heap::make_home(Mapping* alias) {
  Handle* handle = alias->handle;
  if (handle->home != nullptr) leave_home(handle);
  handle->home = alias;
  if (handle->idle_list != nullptr && handle->idle_list != &set_.idle) {
    handle->idle_list->remove(handle);
    set_.idle.push(handle);
  }
  --books_.stats.dormant_aliases;
  if (handle->small != is_small(kind_)) {
    handle->small = is_small(kind_);
    books_.stats.reserved_bytes.reclass(handle->small, handle->size().n);
  }
  count_in_pool(*handle, true);
  Block* block = alias->region->block_covering(alias->begin, books_.blocks);
  set_free_state(isolate(block, alias->begin, alias->end()), BlockState::kReady);
  segment_changed(alias, true);
}

void Heap::leave_home(Handle* handle) {
  Mapping* home = handle->home;
  Heap& heap = *home->heap;
  Block* block = home->region->block_covering(home->begin, heap.books_.blocks);
  Block* part = heap.isolate(block, home->begin, home->end());
  heap.segment_changed(home, false);
  heap.count_in_pool(*handle, false);
  handle->home = nullptr;
  ++heap.books_.stats.dormant_aliases;
  heap.set_free_state(part, BlockState::kVoid);
}

void Heap::forget(Mapping* alias, Books& books) {
  alias->region->set_mapping({alias->begin, alias->size()}, nullptr);
  --books.stats.dormant_aliases;
  books.handles.remove_mapping(alias);
}

// --- misses

Block* Heap::begin_fill(DeviceAddr begin, DeviceAddr end) {
  Region* region = books_.arena.region_of(begin);
  Block* filling = nullptr;
  for (DeviceAddr a = begin; a < end;) {
    Block* block = filling == nullptr ? region->block_covering(a, books_.blocks) : filling->next;
    Block* part = isolate(block, a, std::min(end, block->end()));
    part->state = BlockState::kFilling;
    a = part->end();
    if (filling == nullptr) {
      filling = part;
    } else {
      join(filling, part);
    }
  }
  use(filling);
  return filling;
}

void Heap::install(Block* filling, Handle* handle, DeviceAddr at) {
  Region* region = filling->region;
  Mapping* mapping = books_.handles.add_mapping(handle, region, at);
  handle->home = mapping;
  mapping->uses = 1;
  region->set_mapping({at, mapping->size()}, mapping);
  region->mapped_end = std::max(region->mapped_end, mapping->end());
  if (handle->small != is_small(kind_)) {
    handle->small = is_small(kind_);
    books_.stats.reserved_bytes.reclass(handle->small, handle->size().n);
  }
  count_in_pool(*handle, true);
  segment_changed(mapping, true);
}

Block* Heap::finish_fill(Block* filling, DeviceAddr at, Bytes size) {
  Block* block = filling;
  // The block touches every mapping that the filling touched (miss_plan.hpp), so the uses stand.
  if (at > block->begin) {
    Block* upper = cut(block, at);
    set_free_state(block, BlockState::kReady);
    block = upper;
  }
  if (at + size < block->end()) {
    set_free_state(cut(block, at + size), BlockState::kReady);
  }
  block->state = BlockState::kLive;
  return block;
}

void Heap::cancel_fill(Block* filling) {
  const Region* region = filling->region;  // the block may be merged away before the last part
  const auto ready_at = [&](DeviceAddr a) {
    const Mapping* m = region->mapping_at(a);
    return m != nullptr && m->is_home();
  };
  unuse(filling, nullptr);
  Block* rest = filling;
  while (rest != nullptr) {
    const bool ready = ready_at(rest->begin);
    DeviceAddr to = rest->begin;
    while (to < rest->end() && ready_at(to) == ready) {
      to = DeviceAddr{to.n / kPage.n * kPage.n} + kPage;
    }
    Block* part = rest;
    rest = to < part->end() ? cut(part, to) : nullptr;
    set_free_state(part, ready ? BlockState::kReady : BlockState::kVoid);
  }
}

std::optional<std::string> Heap::validate() const {
  for (const Region* region : regions_) {
    DeviceAddr at = region->range.begin;
    const Block* before = nullptr;
    for (const Block* block = region->first; block != nullptr; block = block->next) {
      if (block->begin != at || block->prev != before || block->heap != this ||
          block->size.n == 0) {
        return "(1) the blocks do not tile the region";
      }
      if (!region->has_begin(at) || region->block_at(at, books_.blocks) != block) {
        return "(1) a block is missing from the table";
      }
      if (before != nullptr && before->state == block->state && block->is_free()) {
        return "(2) two free neighbours were not merged";
      }
      for (DeviceAddr a = block->begin; a < block->end() && block->state != BlockState::kFilling;
           a = DeviceAddr{a.n / kPage.n * kPage.n} + kPage) {
        const Mapping* m = region->mapping_at(a);
        const bool ready = m != nullptr && m->is_home();
        if (block->state == BlockState::kVoid ? ready : !ready) {
          return std::string("(3) memory stands wrongly behind a block that is ") +
                 to_string(block->state);
        }
        if (a >= region->mapped_end && m != nullptr) return "a mapping lies beyond mapped_end";
      }
      if (block->state == BlockState::kReady && block->held != held_bytes(*block)) {
        return "the held bytes of a free block are wrong";
      }
      at = block->end();
      before = block;
    }
    if (at != region->range.end() || region->last != before)
      return "(1) the last block is not last";

    for (DeviceAddr a = region->range.begin; a < region->mapped_end;) {
      const Mapping* m = region->mapping_at(a);
      if (m == nullptr) {
        a = a + kPage;
        continue;
      }
      std::uint32_t uses = 0;
      for (const Block* b = region->block_covering(m->begin, books_.blocks);
           b != nullptr && b->begin < m->end(); b = b->next) {
        uses += b->is_free() ? 0 : 1;
      }
      if (uses != m->uses) return "(4) a mapping's uses are not the blocks that touch it";
      const Handle& h = *m->handle;
      if (m->is_home() && !h.pinned && (h.idle_list != nullptr) != (m->uses == 0)) {
        return "(5) a handle is idle and in use";
      }
      if (m->is_home() && h.idle_list != nullptr && h.idle_list != &set_.idle) {
        return "(5) an idle handle waits in another heap set's list";
      }
      a = m->end();
    }
  }
  return std::nullopt;
}

}  // namespace gpumemx
