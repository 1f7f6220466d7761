// SPDX-License-Identifier: BSD-3-Clause
#include "core/handle_pool.hpp"

#include "base/check.hpp"

namespace gpumemx {

void IdleList::push(Handle* handle) {
  GPUMEMX_CHECK(handle->idle_list == nullptr, "a handle became idle twice");
  Ends& ends = sizes_[handle->pages];
  handle->idle_prev = ends.last;
  handle->idle_next = nullptr;
  (ends.last != nullptr ? ends.last->idle_next : ends.first) = handle;
  ends.last = handle;
  handle->idle_list = this;
  map_ |= 1ull << handle->pages;
  bytes_ += handle->size();
}

void IdleList::remove(Handle* handle) {
  GPUMEMX_CHECK(handle->idle_list == this,
                "a handle that is not idle was taken from the idle list");
  Ends& ends = sizes_[handle->pages];
  (handle->idle_prev != nullptr ? handle->idle_prev->idle_next : ends.first) = handle->idle_next;
  (handle->idle_next != nullptr ? handle->idle_next->idle_prev : ends.last) = handle->idle_prev;
  handle->idle_prev = handle->idle_next = nullptr;
  handle->idle_list = nullptr;
  if (ends.first == nullptr) map_ &= ~(1ull << handle->pages);
  bytes_ -= handle->size();
}

Mapping* oldest_droppable(const Handle& handle) {
  Mapping* oldest = nullptr;
  for (Mapping* m = handle.aliases; m != nullptr; m = m->next_alias) {
    // The list has the newest in front, so the last one found is the oldest.
    if (!m->is_home() && m->last_use.complete()) oldest = m;
  }
  return oldest;
}

Handle* HandlePool::add(HandleId driver, std::uint32_t pages) {
  Handle* handle = handles_.acquire();
  handle->driver = driver;
  handle->pages = pages;
  ++handle_count_;
  return handle;
}

void HandlePool::remove(Handle* handle) {
  GPUMEMX_CHECK(handle->aliases == nullptr && handle->idle_list == nullptr,
                "a handle was dropped while it stands somewhere");
  handles_.release(handle);
  --handle_count_;
}

Mapping* HandlePool::add_mapping(Handle* handle, Region* region, DeviceAddr begin) {
  Mapping* mapping = mappings_.acquire();
  mapping->begin = begin;
  mapping->handle = handle;
  mapping->pages = handle->pages;
  mapping->region = region;
  mapping->heap = region->heap;
  mapping->next_alias = handle->aliases;
  handle->aliases = mapping;
  ++handle->alias_count;
  ++mapping_count_;
  return mapping;
}

void HandlePool::remove_mapping(Mapping* mapping) {
  Handle* handle = mapping->handle;
  for (Mapping** link = &handle->aliases; *link != nullptr; link = &(*link)->next_alias) {
    if (*link != mapping) continue;
    *link = mapping->next_alias;
    break;
  }
  --handle->alias_count;
  --mapping_count_;
  mappings_.release(mapping);
}

}  // namespace gpumemx
