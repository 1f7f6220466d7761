// SPDX-License-Identifier: BSD-3-Clause
//
// Memory that others reach too: blocks that are shared with other processes, memory of theirs, and
// devices that are peers of this one.
//
// Nothing keeps a shared handle in its place but the block itself: handles under a block in use are
// never harvested, and torch frees a shared block only when every consumer has counted down (its
// CudaIPCSentData holds the block until then). What is added here: Block::shared, so that the
// memory of a shared block is not replaced when a neighbour is shared.
#include "core/sharing.hpp"

#include <algorithm>
#include <utility>

#include "base/check.hpp"
#include "core/allocator.hpp"

namespace gpumemx {

namespace {

// What a plan costs, in microseconds as measured (docs/design.md), and what memory is worth: a page
// that is mapped for nothing stays so for the life of the block.
constexpr double kExportUs = 1150;
constexpr double kReplaceUs = 120;  // create, map twice, set access twice, unmap
constexpr double kCopyPageUs = 1.1;
constexpr double kExtraPageUs = 300;
constexpr double kDisturbUs = 1e9;  // only when nothing else serves

constexpr int kHoldTries = 40;  // ten seconds in which the streams never come to rest

}  // namespace

std::optional<UniformPlan> plan_uniform(const std::vector<BackingPart>& parts, std::uint64_t room) {
  const auto is_other = [&](const BackingPart& part) { return part.pages != parts.front().pages; };
  if (std::none_of(parts.begin(), parts.end(), is_other)) {
    return UniformPlan{parts.front().pages, parts.size(), 0};
  }
  std::optional<UniformPlan> best;
  double best_cost = 0;
  const auto consider = [&](std::uint32_t pages, std::size_t front, std::size_t back) {
    UniformPlan plan{pages, front, back};
    std::uint64_t replaced = 0;
    double cost = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const BackingPart& part = parts[i];
      if (i < front || i >= parts.size() - back) {
        if (!part.is_exported) cost += kExportUs;
        continue;
      }
      if (part.fixed) return;
      replaced += part.pages;
      plan.disturbs_others = plan.disturbs_others || part.has_others;
    }
    plan.created = (replaced + pages - 1) / pages;
    plan.extra = plan.created * pages - replaced;
    if (plan.extra > (back == 0 ? room : 0)) return;
    cost += static_cast<double>(plan.created) * (kExportUs + kReplaceUs) +
            static_cast<double>(replaced) * kCopyPageUs +
            static_cast<double>(plan.extra) * kExtraPageUs;
    if (plan.disturbs_others) cost += kDisturbUs;
    if (best && cost >= best_cost) return;
    best = plan;
    best_cost = cost;
  };
  for (std::uint32_t pages = 1; pages <= kMaxHandlePages; ++pages) {
    const auto other = [&](const BackingPart& part) { return part.pages != pages; };
    const auto front = std::find_if(parts.begin(), parts.end(), other) - parts.begin();
    const auto back = std::find_if(parts.rbegin(), parts.rend(), other) - parts.rbegin();
    consider(pages, static_cast<std::size_t>(front), static_cast<std::size_t>(back));
    if (back != 0) consider(pages, static_cast<std::size_t>(front), 0);
  }
  return best;
}

// --- sharing a block

Result<SharedRange> DeviceAllocator::share(DeviceAddr address) {
  if (shut_down_) return Error{Errc::kShuttingDown, {}, "share"};
  const RelaxedCapture relaxed(driver_);
  if (const auto known = share_as_it_is(address)) return *known;
  const auto while_capturing = [] {
    return Error{Errc::kCaptureActive, {}, "share: memory can't be moved during a capture"};
  };
  if (captures_.load() > 0) return while_capturing();

  for (int tries = 0; tries < kHoldTries; ++tries) {
    // With no lock held: what the device waits for may be another thread's request.
    close_epochs();
    if (const Status idle = driver_.synchronize(); !idle.ok()) return idle.error();
    const MutexLock work(work_mu_);
    // None begins from here on: see begin_capture().
    if (captures_.load() > 0) return while_capturing();
    poll();  // what is free is known to be idle too
    std::vector<StreamRef> streams;
    {
      const MutexLock lock(mu_);
      const auto block = block_in_use(address);
      if (!block.ok()) return block.error();
      if (auto error = make_room_for_copy(backing_of(*block.value()))) return *error;
      for (const Timeline* line : timeline_list_) {
        // Others may be gone, or be another thread's.
        if (line->stream().permanent) streams.push_back(line->stream().ref);
      }
    }
    // What the program queues from now on waits: torch shares in a thread of its queue, while the program
    // goes on. With work_mu_ held, since whoever has it may be in a call that waits for these streams.
    const auto held = driver_.hold(streams);
    if (!held.ok()) return held.error();
    if (held.value() == HoldId{}) continue;  // something long was queued just now
    std::optional<Error> error;
    std::optional<Result<Block*>> block;
    {
      const MutexLock lock(mu_);
      block = block_in_use(address);
      if (block->ok()) error = replace_backing(*block->value());
    }
    driver_.let_go(held.value());
    if (error) return *error;
    const MutexLock lock(mu_);
    block = block_in_use(address);
    if (!block->ok()) return block->error();
    return export_block(*block->value(), backing_of(*block->value()).mappings);
  }
  return Error{Errc::kDriverFailure, {}, "share: the streams of this device never come to rest"};
}

// Nothing where the memory would have to be replaced first.
std::optional<Result<SharedRange>> DeviceAllocator::share_as_it_is(DeviceAddr address) {
  const MutexLock work(work_mu_);
  const MutexLock lock(mu_);
  const auto block = block_in_use(address);
  if (!block.ok()) return block.error();
  if (block.value()->region->plain) return SharedRange{block.value()->region->range, {}};
  if (!driver_.traits().exportable) {
    return Error{Errc::kUnsupported, block.value()->size, "share: this device can't export memory"};
  }
  const Backing backing = backing_of(*block.value());
  if (backing.plan && !backing.plan->is_nothing()) return std::nullopt;
  return export_block(*block.value(), backing.mappings);
}

Result<Block*> DeviceAllocator::block_in_use(DeviceAddr address) const {
  {
    const AllFronts closed(*this);
  }  // what is parked is not in use
  const Region* region = books_.arena.region_of(address);
  Block* block = region == nullptr ? nullptr : region->block_covering(address, books_.blocks);
  if (block == nullptr || block->state != BlockState::kLive) {
    return Error{Errc::kInvalidArgument, {}, "share: the address is in no block in use"};
  }
  return block;
}

DeviceAllocator::Backing DeviceAllocator::backing_of(const Block& block) const {
  Backing backing;
  const Region& region = *block.region;
  std::vector<BackingPart> parts;
  for (DeviceAddr a = block.begin; a < block.end();) {
    Mapping* mapping = region.mapping_at(a);
    backing.mappings.push_back(mapping);
    BackingPart part;
    part.pages = mapping->handle->pages;
    part.is_exported = mapping->handle->exported;
    for (const Block* b = region.block_covering(mapping->begin, books_.blocks);
         b != nullptr && b->begin < mapping->end(); b = b->next) {
      if (b == &block || b->is_free()) continue;
      part.has_others = true;
      part.fixed = part.fixed || (b->state == BlockState::kLive && b->shared);
    }
    if (block.shared) part.fixed = true;  // its consumers have what is there now
    parts.push_back(part);
    a = mapping->end();
  }

  // Behind the last handle: pages without memory, where nothing is queued any more.
  const DeviceAddr end = backing.mappings.back()->end();
  const Block* next =
      end < region.range.end() ? region.block_covering(end, books_.blocks) : nullptr;
  std::uint64_t room = 0;
  if (next != nullptr && next->state == BlockState::kVoid) {
    for (DeviceAddr a = end; a < next->end() && room < kMaxHandlePages; a = a + kPage, ++room) {
      const Mapping* m = region.mapping_at(a);
      if (m != nullptr && !m->last_use.complete()) break;
    }
  }
  backing.plan = plan_uniform(parts, room);
  return backing;
}

Result<SharedRange> DeviceAllocator::export_block(Block& block,
                                                  const std::vector<Mapping*>& mappings) {
  SharedRange shared;
  shared.range = {mappings.front()->begin, mappings.back()->end() - mappings.front()->begin};
  std::vector<HandleId> handles;
  for (const Mapping* mapping : mappings) {
    mapping->handle->exported = true;
    handles.push_back(mapping->handle->driver);
    shared.handles.push_back({mapping->size(), -1});
  }
  block.shared = true;
  const MutexUnlock driver_only(mu_);
  for (std::size_t i = 0; i < handles.size(); ++i) {
    const auto descriptor = driver_.export_handle(handles[i]);
    if (!descriptor.ok()) return descriptor.error();
    shared.handles[i].descriptor = descriptor.value();
  }
  return shared;
}

// The old memory and the new stand side by side for a moment.
std::optional<Error> DeviceAllocator::make_room_for_copy(const Backing& backing) {
  if (!backing.plan) return std::nullopt;
  const Bytes more = kPage * (backing.plan->created * backing.plan->pages);
  if (reserved() + more > cap()) (void)release_idle(cap() < more ? Bytes{} : cap() - more);
  if (reserved() + more <= cap()) return std::nullopt;
  return Error{Errc::kOutOfMemory, more, "share: no room for a copy of the block's memory"};
}

// Replaces the handles between those that stay. All that is free on them and behind them is taken away
// from others meanwhile; other blocks in use there (UniformPlan::disturbs_others) can't be.
// REQUIRES: the device was idle, and the streams that are known are held.
std::optional<Error> DeviceAllocator::replace_backing(Block& block) {
  const Backing backing = backing_of(block);
  if (!backing.plan || backing.plan->is_nothing()) return std::nullopt;
  const UniformPlan& plan = *backing.plan;
  Heap& heap = *block.heap;
  Region& region = *block.region;
  const auto first = backing.mappings.begin() + static_cast<std::ptrdiff_t>(plan.keep_front);
  const auto last = backing.mappings.end() - static_cast<std::ptrdiff_t>(plan.keep_back);
  const std::vector<Mapping*> old(first, last);
  const Bytes size = kPage * plan.pages;
  const AddrRange before{old.front()->begin, old.back()->end() - old.front()->begin};
  const AddrRange after{before.begin, size * plan.created};

  std::vector<Unmap> unmaps;
  for (DeviceAddr a = before.end(); a < after.end(); a = a + kPage) {
    if (Mapping* stale = region.mapping_at(a)) drop_alias(stale, unmaps);
  }
  std::vector<Block*> fillings;
  if (after.end() > before.end()) fillings.push_back(heap.begin_fill(before.end(), after.end()));
  for (Block* b = region.block_covering(before.begin, books_.blocks);
       b != nullptr && b->begin < before.end(); b = b->next) {
    if (!b->is_free()) continue;
    b = heap.begin_fill(std::max(b->begin, before.begin), std::min(b->end(), before.end()));
    fillings.push_back(b);
  }

  Exchange work{before, after, size, {}, {}};
  for (const Mapping* mapping : old) {
    work.old.push_back({{mapping->begin, mapping->size()}, mapping->handle->driver});
  }
  std::optional<Error> error;
  {
    const MutexUnlock driver_only(mu_);
    error = unmap_all(unmaps);
    if (!error) error = exchange_memory(work);
  }

  std::vector<Handle*> fresh;
  for (const HandleId created : work.fresh) {  // on failure those that could not be released
    Handle* handle = books_.handles.add(created, plan.pages);
    handle->small = is_small(heap.kind());
    books_.stats.reserved_bytes.add(handle->small, handle->size().n);
    ++books_.stats.num_device_alloc;
    fresh.push_back(handle);
  }
  std::vector<Handle*> idle = fresh;
  if (!error) {
    idle.clear();
    for (const Mapping* mapping : old) idle.push_back(mapping->handle);
    heap.exchange(old, fresh, after);
    books_.stats.paths.created += fresh.size();
    books_.stats.paths.rebacked += fresh.size();
    if (plan.disturbs_others) ++books_.stats.paths.disturbed;
  }
  for (Handle* handle : idle) books_.handles.loose().push(handle);
  for (Block* filling : fillings) heap.cancel_fill(filling);
  restore(unmaps);  // not earlier: the filling does not count as their user
  return error;
}

// The driver's part: copies to new handles at an address that nobody uses, then changes places. On
// failure everything is as it was, but for handles in `fresh` that the driver would not take back.
std::optional<Error> DeviceAllocator::exchange_memory(Exchange& work) {
  const auto scratch = driver_.reserve(work.after.size, kPage);
  if (!scratch.ok()) return scratch.error();
  const auto at = [&](AddrRange range, std::size_t i) {
    return AddrRange{range.begin + work.size * i, work.size};
  };
  std::optional<Error> error;
  const auto failed = [&](const auto& result) {
    if (!result.ok() && !error) error = result.error();
    return !result.ok();
  };

  std::size_t in_scratch = 0;
  for (const std::size_t count = work.after.size.n / work.size.n; in_scratch < count;) {
    auto created = driver_.create(work.size);
    if (failed(created)) break;
    work.fresh.push_back(created.value());
    if (failed(driver_.map(at(scratch.value(), in_scratch), created.value()))) break;
    ++in_scratch;
    if (failed(driver_.set_access(at(scratch.value(), in_scratch - 1)))) break;
  }
  if (!error) {
    (void)failed(driver_.copy(scratch.value().begin, work.before.begin, work.before.size));
  }

  // From here on the block has no memory until the last call of the second loop.
  std::size_t taken = 0;
  std::size_t placed = 0;
  if (!error) {
    while (taken < work.old.size() && !failed(driver_.unmap(work.old[taken].range))) ++taken;
    while (!error && placed < work.fresh.size() &&
           !failed(driver_.map(at(work.after, placed), work.fresh[placed]))) {
      ++placed;
    }
    if (!error) (void)failed(driver_.set_access(work.after, peers_));
  }
  if (error && taken > 0) {
    // A driver that does not even let things go back has lost a tensor's memory.
    bool is_back = error->code != Errc::kShuttingDown;
    for (std::size_t i = 0; is_back && i < placed; ++i) {
      is_back = driver_.unmap(at(work.after, i)).ok();
    }
    for (std::size_t i = 0; is_back && i < taken; ++i) {
      is_back = driver_.map(work.old[i].range, work.old[i].handle).ok() &&
                driver_.set_access(work.old[i].range, peers_).ok();
    }
    GPUMEMX_CHECK(is_back || error->code == Errc::kShuttingDown,
                  "the driver failed twice while a block's memory was replaced");
  }

  bool all_gone = true;
  for (std::size_t i = 0; i < in_scratch; ++i)
    all_gone = unmap_for_good(at(scratch.value(), i)) && all_gone;
  if (all_gone) (void)driver_.unreserve(scratch.value());
  if (error) std::erase_if(work.fresh, [&](HandleId h) { return driver_.release(h).ok(); });
  return error;
}

void Heap::exchange(const std::vector<Mapping*>& old, const std::vector<Handle*>& fresh,
                    AddrRange range) {
  Region* region = old.front()->region;
  // What another thread freed meanwhile lies in the free index by the old handles' borders.
  std::vector<Block*> ready;
  for (Block* b = region->block_covering(range.begin, books_.blocks);
       b != nullptr && b->begin < range.end(); b = b->next) {
    if (b->state == BlockState::kReady) ready.push_back(b);
  }
  for (Block* b : ready) unlink(b);

  Stamp last_use;  // of neighbours; all of it on this heap's own stream
  for (Mapping* mapping : old) {
    Handle* handle = mapping->handle;
    if (!mapping->last_use.complete() && mapping->last_use.epoch >= last_use.epoch) {
      last_use = mapping->last_use;
    }
    segment_changed(mapping, false);
    region->set_mapping({mapping->begin, mapping->size()}, nullptr);
    handle->last_use = mapping->last_use;
    handle->home = nullptr;
    handle->pinned = handle->kept = false;
    books_.handles.remove_mapping(mapping);
  }
  DeviceAddr at = range.begin;
  for (Handle* handle : fresh) {
    Mapping* mapping = books_.handles.add_mapping(handle, region, at);
    at = mapping->end();
    handle->home = mapping;
    handle->pinned = set_.is_private;
    mapping->last_use = last_use;
    region->set_mapping({mapping->begin, mapping->size()}, mapping);
    region->mapped_end = std::max(region->mapped_end, at);
    for (const Block* b = region->block_covering(mapping->begin, books_.blocks);
         b != nullptr && b->begin < at; b = b->next) {
      if (!b->is_free()) ++mapping->uses;
    }
    segment_changed(mapping, true);
    if (mapping->uses == 0) {  // only what was freed meanwhile stands here
      handle->last_use = last_use;
      retire(handle);
    }
  }
  for (Block* b : ready) link(b);
}

// --- memory of other processes

Result<DeviceAddr> DeviceAllocator::import_memory(const std::vector<ForeignHandle>& handles) {
  if (shut_down_) return Error{Errc::kShuttingDown, {}, "import_memory"};
  const Bytes granularity = driver_.traits().granularity;
  Import import;
  for (const ForeignHandle& h : handles) {
    if (h.size.n == 0 || h.size.n % granularity.n != 0 || h.size > kMaxRequest) {
      return Error{Errc::kInvalidArgument, h.size, "import_memory: no size of a handle"};
    }
    import.range.size += h.size;
  }
  if (handles.empty()) return Error{Errc::kInvalidArgument, {}, "import_memory: no handles"};
  close_ended_imports();
  const RelaxedCapture relaxed(driver_);
  const MutexLock work(work_mu_);
  const auto range = driver_.reserve(import.range.size, granularity);
  if (!range.ok()) return range.error();
  import.range = range.value();
  std::optional<Error> error;
  DeviceAddr at = import.range.begin;
  for (const ForeignHandle& h : handles) {
    const auto handle = std::holds_alternative<int>(h.handle)
                            ? driver_.import_handle(std::get<int>(h.handle))
                            : driver_.import_fabric(std::get<FabricHandle>(h.handle));
    if (!handle.ok()) {
      error = handle.error();
      break;
    }
    import.handles.push_back(handle.value());
    const AddrRange place{at, h.size};
    if (const Status mapped = driver_.map(place, handle.value()); !mapped.ok()) {
      error = mapped.error();
      break;
    }
    import.mapped.push_back(place);
    at = place.end();
  }
  if (!error) {
    const Status usable = driver_.set_access(import.range, peers_);
    if (!usable.ok()) error = usable.error();
  }
  if (error) {
    drop(import);
    return *error;
  }
  imports_.emplace(import.range.begin, import);
  return import.range.begin;
}

void DeviceAllocator::close_import(DeviceAddr address) {
  if (shut_down_) return;
  {
    const MutexLock work(work_mu_);
    GPUMEMX_CHECK(imports_.contains(address), "close_import() of an address that was not imported");
    ended_imports_.push_back(address);
  }
  close_ended_imports();
}

void DeviceAllocator::close_ended_imports() {
  if (captures_.load() > 0) return;  // waiting would end the capture: the next import does it
  const RelaxedCapture relaxed(driver_);
  std::vector<DeviceAddr> ended;
  {
    const MutexLock work(work_mu_);
    ended = std::exchange(ended_imports_, {});
  }
  if (ended.empty()) return;
  // With no lock held. Work on the memory may be queued on any stream, as torch's own receiver has it.
  (void)driver_.synchronize();
  const MutexLock work(work_mu_);
  for (const DeviceAddr address : ended) {
    const auto found = imports_.find(address);
    drop(found->second);
    imports_.erase(found);
  }
}

// Of a mapping that is in no books. Asked twice, for nobody comes back to it: what the driver keeps
// then costs addresses, and the memory of its handle.
bool DeviceAllocator::unmap_for_good(AddrRange range) {
  return driver_.unmap(range).ok() || driver_.unmap(range).ok();
}

void DeviceAllocator::drop(const Import& import) {
  bool all_gone = true;
  for (std::size_t i = 0; i < import.handles.size(); ++i) {
    const bool unmapped = i >= import.mapped.size() || unmap_for_good(import.mapped[i]);
    all_gone = unmapped && all_gone;
    if (unmapped) (void)driver_.release(import.handles[i]);
  }
  if (all_gone) (void)driver_.unreserve(import.range);
}

void DeviceAllocator::drop_imports() {
  const MutexLock work(work_mu_);
  if (!imports_.empty()) (void)driver_.synchronize();
  for (const auto& [address, import] : imports_) drop(import);
  imports_.clear();
}

// --- peers

Status DeviceAllocator::add_peer(int device) {
  if (shut_down_) return ok_status();
  const RelaxedCapture relaxed(driver_);
  // Held to the end: nothing is mapped or unmapped meanwhile, so that no mapping is missed.
  const MutexLock work(work_mu_);
  if (std::find(peers_.begin(), peers_.end(), device) != peers_.end()) return ok_status();
  std::vector<AddrRange> ranges;
  {
    const MutexLock lock(mu_);
    books_.handles.for_each([&](const Handle* handle) {
      if (handle->driver == HandleId{})
        return;  // plain memory: cudaDeviceEnablePeerAccess() does it
      for (const Mapping* m = handle->aliases; m != nullptr; m = m->next_alias) {
        ranges.push_back({m->begin, m->size()});
      }
    });
  }
  for (const auto& [address, import] : imports_) ranges.push_back(import.range);
  for (const AddrRange range : ranges) {
    const Status done = driver_.set_access(range, {device});
    if (!done.ok()) return done;  // who has access keeps it; the next call begins anew
  }
  peers_.push_back(device);
  return ok_status();
}

// --- a block at an address

std::optional<AllocResult> DeviceAllocator::allocate_at(const AllocRequest& request,
                                                        DeviceAddr address) {
  if (shut_down_ || request.size > kMaxRequest || address.n % kGranule.n != 0) return std::nullopt;
  const Bytes size = block_size(request.size);
  const RelaxedCapture relaxed(driver_);
  do {
    close_epochs();
    const MutexLock work(work_mu_);
    poll();
    const MutexLock lock(mu_);
    unpark_all();
    HeapSet& set = heap_set(request.stream, request.pool);
    Region* region = books_.arena.region_of(address);
    if (region == nullptr || &region->heap->set() != &set || size > region->range.end() - address) {
      return std::nullopt;
    }
    Heap& heap = *region->heap;
    Block* first = region->block_covering(address, books_.blocks);
    if (first->state == BlockState::kReady && size <= first->end() - address) {
      ++books_.stats.paths.hits;
      return hand_out(heap.take(first, address, size), request);
    }
    const Block* last = first;
    for (; last != nullptr && last->is_free() && last->end() < address + size; last = last->next) {
    }
    if (last == nullptr || !last->is_free() || region->plain) return std::nullopt;
    MissPlanner planner(default_sets_, books_.handles);
    const Candidate place{0, 0, last->end() - first->begin, address, last->end(), region};
    const auto plan = planner.plan(heap, place, size, policy(request.size),
                                   /*may_exceed_budget=*/true);
    if (plan) {
      ++books_.stats.paths.misses;
      Served served = execute(*plan);
      if (served.block == nullptr) return std::nullopt;
      return hand_out(served.block, request);
    }
    // Other memory has to come here, which work that is queued on this address does not allow yet.
  } while (wait_for_any());
  return std::nullopt;
}

}  // namespace gpumemx
