// SPDX-License-Identifier: BSD-3-Clause
//
// Aliases and handles leave: mappings are dropped, memory goes back to the device. Every driver call
// here can fail; then the books are put back as they were.
#include <algorithm>
#include <utility>

#include "base/check.hpp"
#include "core/allocator.hpp"
#include "core/planted.hpp"

namespace gpumemx {

void DeviceAllocator::drop_alias(Mapping* alias, std::vector<Unmap>& unmaps) {
  unmaps.push_back({alias->begin, alias->handle, alias->region, alias->last_use});
  Heap::forget(alias, books_);
}

// Unmaps all of them; on failure what is left in `unmaps` is still mapped.
std::optional<Error> DeviceAllocator::unmap_all(std::vector<Unmap>& unmaps) {
  while (!unmaps.empty()) {
    const Unmap& u = unmaps.back();
    const Status done = driver_.unmap({u.begin, u.handle->size()});
    if (!done.ok()) return done.error();
    unmaps.pop_back();
  }
  return std::nullopt;
}

void DeviceAllocator::restore(const std::vector<Unmap>& unmaps) {
  for (const Unmap& u : unmaps) {
    Mapping* mapping = books_.handles.add_mapping(u.handle, u.region, u.begin);
    mapping->last_use = u.last_use;
    u.region->set_mapping({u.begin, mapping->size()}, mapping);
    ++books_.stats.dormant_aliases;
  }
}

// Unmaps a handle everywhere and gives its memory back. REQUIRES: idle, not in a list, its last uses
// complete at every address. False when the driver failed: the handle is loose then.
bool DeviceAllocator::release(Handle* handle) {
  if (handle->home != nullptr) Heap::leave_home(handle);
  std::vector<Unmap> unmaps;
  while (handle->aliases != nullptr) drop_alias(handle->aliases, unmaps);
  const std::size_t dropped = unmaps.size();
  bool released = false;
  {
    const MutexUnlock driver_only(mu_);
    released = !unmap_all(unmaps) && driver_.release(handle->driver).ok();
  }
  books_.stats.paths.aliases_dropped += dropped - unmaps.size();
  restore(unmaps);
  if (!released) {
    handle->pinned = false;
    books_.handles.loose().push(handle);
    return false;
  }
  books_.stats.reserved_bytes.sub(handle->small, handle->size().n);
  ++books_.stats.num_device_free;
  books_.handles.remove(handle);
  return true;
}

bool DeviceAllocator::release_plain(Handle* handle) {
  Heap& heap = *handle->home->heap;
  const Bytes size = handle->size();
  const AddrRange range = heap.drop_segment(handle);
  bool freed = true;
  if (heap.set().source != nullptr) {
    returned_.push_back({heap.set().source, range.begin});  // it is called without locks
    has_returned_ = true;
  } else {
    const MutexUnlock driver_only(mu_);
    freed = driver_.free(range.begin).ok();
  }
  if (!freed) {
    heap.add_segment(range, handle);
    return false;
  }
  books_.stats.reserved_bytes.sub(handle->small, size.n);
  ++books_.stats.num_device_free;
  books_.handles.remove(handle);
  return true;
}

// The driver holds only so many mappings: all dormant aliases go whose work is done.
void DeviceAllocator::drop_complete_aliases() {
  std::vector<Handle*> movable;
  books_.handles.for_each([&](Handle* handle) {
    if (!handle->pinned) movable.push_back(handle);
  });
  std::vector<Unmap> unmaps;
  for (Handle* handle : movable) {
    while (Mapping* oldest = oldest_droppable(*handle)) drop_alias(oldest, unmaps);
  }
  const std::size_t dropped = unmaps.size();
  {
    const MutexUnlock driver_only(mu_);
    (void)unmap_all(unmaps);
  }
  books_.stats.paths.aliases_dropped += dropped - unmaps.size();
  restore(unmaps);
}

// Whether a handle that a re-cut replaces may be left to maintain(). What waits there is reserved, so a
// program that asks faster than maintain() gets to work must not pile it up.
bool DeviceAllocator::can_release_later(const Handle& handle) const {
  if (!options_.background) return false;
  Bytes bytes = handle.size();
  for (const Handle* h : doomed_) bytes += h->size();
  return bytes <= policy({}).doomed_at_most();
}

// What a re-cut replaced goes back. False when there was none.
bool DeviceAllocator::release_doomed() {
  const std::vector<Handle*> doomed = std::exchange(doomed_, {});
  for (Handle* handle : doomed) (void)release(handle);
  return !doomed.empty();
}

// One driver call at a time: the driver's own lock is unfair, so an allocating thread that finds this
// one inside must not find it there again (docs/design.md, "Background work").
bool DeviceAllocator::maintain(bool release_returning) {
  if (shut_down_ || wanting_work_.load() > 0 || !work_mu_.try_lock()) return false;
  const RelaxedCapture relaxed(driver_);
  bool any = maintain_once(release_returning);
  if (!any && release_returning && returning().n > 0) {
    // What is marked is not known to be complete: nobody has asked yet.
    close_epochs();
    any = poll() && maintain_once(release_returning);
  }
  work_mu_.unlock();
  return any;
}

bool DeviceAllocator::maintain_once(bool release_returning) {
  const MutexLock lock(mu_);
  if (retire_doomed() || trim_crowded()) return true;
  return release_returning && doom_returning() && retire_doomed();
}

// Unmaps one alias of a handle that is to go, or releases it.
bool DeviceAllocator::retire_doomed() {
  if (doomed_.empty()) return false;
  Handle* handle = doomed_.back();
  if (handle->home != nullptr) Heap::leave_home(handle);
  if (handle->aliases == nullptr) {
    doomed_.pop_back();
    (void)release(handle);
    return true;
  }
  std::vector<Unmap> unmaps;
  drop_alias(handle->aliases, unmaps);
  {
    const MutexUnlock driver_only(mu_);
    (void)unmap_all(unmaps);
  }
  if (unmaps.empty()) {
    ++books_.stats.paths.aliases_dropped;
  } else {
    restore(unmaps);
    std::erase(doomed_, handle);
    handle->pinned = false;
    books_.handles.loose().push(handle);
  }
  return true;
}

// Unmaps one alias beyond Options::max_aliases.
bool DeviceAllocator::trim_crowded() {
  while (!crowded_.empty()) {
    Handle* handle = books_.handles.find(crowded_.back());  // it may be gone since, or hold less
    const bool crowded =
        handle != nullptr && handle->alias_count > static_cast<std::uint32_t>(options_.max_aliases);
    Mapping* oldest = crowded ? oldest_droppable(*handle) : nullptr;
    if (oldest == nullptr) {
      crowded_.pop_back();
      continue;
    }
    std::vector<Unmap> unmaps;
    drop_alias(oldest, unmaps);
    {
      const MutexUnlock driver_only(mu_);
      (void)unmap_all(unmaps);
    }
    if (unmaps.empty()) {
      ++books_.stats.paths.aliases_dropped;
    } else {
      restore(unmaps);
      crowded_.pop_back();
    }
    return true;
  }
  return false;
}

}  // namespace gpumemx
