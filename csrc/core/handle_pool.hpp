// SPDX-License-Identifier: BSD-3-Clause
//
// All handles and mappings of a device, and lists of the idle ones.
//
// A handle is idle when nothing in use stands on it. It then waits in the list of the heap set that
// used it last (its contents are ordered on that set's stream) or in loose(), when no stream has
// used it since it was created or since its last use was known complete. Lists are by size and the
// one idle longest is in front, so within one set the front is also the first to be complete.
//
// Not thread-safe: guarded by the allocator's lock.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/arena.hpp"
#include "core/records.hpp"
#include "core/slab.hpp"

namespace gpumemx {

class IdleList {
 public:
  void push(Handle* handle);
  void remove(Handle* handle);

  Handle* front(std::uint32_t pages) const { return sizes_[pages].first; }
  // Bit n is set when a handle of n pages is here.
  std::uint64_t sizes() const { return map_; }
  Bytes bytes() const { return bytes_; }

  // Calls visit(handle) for every handle, smallest first; visit may remove the handle it is given.
  template <class Visit>
  void for_each(Visit visit) const {
    for (std::uint64_t bits = map_; bits != 0; bits &= bits - 1) {
      for (Handle* h = sizes_[std::countr_zero(bits)].first; h != nullptr;) {
        Handle* next = h->idle_next;
        visit(h);
        h = next;
      }
    }
  }

 private:
  struct Ends {
    Handle* first = nullptr;
    Handle* last = nullptr;
  };
  std::array<Ends, kMaxHandlePages + 1> sizes_{};
  std::uint64_t map_ = 0;
  Bytes bytes_;
};

// The handle's oldest dormant alias that can be unmapped (its work is done), or null.
Mapping* oldest_droppable(const Handle& handle);

class HandlePool {
 public:
  Handle* add(HandleId driver, std::uint32_t pages);
  // REQUIRES: no mappings, in no list.
  void remove(Handle* handle);

  // Records of mappings; the caller links them into the region's tables.
  Mapping* add_mapping(Handle* handle, Region* region, DeviceAddr begin);
  void remove_mapping(Mapping* mapping);

  // The handle with this number, or null when it is gone.
  Handle* find(std::uint32_t id) const {
    Handle* handle = handles_.at(id);
    return handle->pages != 0 ? handle : nullptr;
  }
  template <class Visit>
  void for_each(Visit visit) const {
    handles_.for_each([&](Handle* handle) {
      if (handle->pages != 0) visit(handle);
    });
  }

  IdleList& loose() { return loose_; }
  const IdleList& loose() const { return loose_; }
  std::uint64_t mappings() const { return mapping_count_; }
  std::uint64_t handles() const { return handle_count_; }
  std::uint64_t next_serial() { return ++serial_; }

 private:
  Slab<Handle> handles_;
  Slab<Mapping> mappings_;
  IdleList loose_;
  std::uint64_t handle_count_ = 0;
  std::uint64_t mapping_count_ = 0;
  std::uint64_t serial_ = 0;
};

}  // namespace gpumemx
