// SPDX-License-Identifier: BSD-3-Clause
//
// The records that the core is made of, and how they point at each other:
//
//   Block    a range of addresses of one region: in use, or free
//   Region   addresses that a heap took from the arena (or one plain device allocation)
//   Mapping  one handle at one place of a region: its standing place, or a dormant alias of it
//   Handle   physical memory, with all its mappings
//
// Invariants, checked by Heap::validate():
//   (1) The blocks of a region tile it: each begins where the one before it ends.
//   (2) No two neighbours are both kReady or both kVoid.
//   (3) Every page under a block that is kReady, kLive or kPending has a mapping, which is its
//       handle's home; kVoid blocks are whole pages, none of which is anybody's home.
//   (4) Mapping::uses is the number of kLive and kPending (and kFilling) blocks that it touches.
//   (5) A handle is in an idle list exactly when it is not pinned and its home (if any) has no uses.
//
// A handle is used at one address at a time, its home. Where it stood before it may stay mapped as a
// dormant alias: work that is queued there still runs on the same memory, and the address can become
// the home again without a driver call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/cache_line.hpp"
#include "base/units.hpp"
#include "core/context.hpp"
#include "core/size_classes.hpp"
#include "core/timeline.hpp"

namespace gpumemx {

class Front;
class Heap;
class IdleList;
struct Handle;
struct Mapping;
struct Region;

enum class BlockState : std::uint8_t {
  kVoid,     // free addresses without memory (there may be dormant aliases)
  kReady,    // free, and memory stands behind every byte
  kFilling,  // taken by a miss that is still getting memory from the driver
  kLive,     // given to the caller
  kPending,  // freed by the caller, still in use by streams that were recorded on it
};
const char* to_string(BlockState state);

// What the caller attached to a block. Empty for free blocks.
struct BlockUse {
  Bytes requested;
  std::uint64_t tag = 0;                           // the caller's; later features hang on it
  ContextRef context;                              // opaque; handed to the history
  std::unique_ptr<std::vector<Timeline*>> others;  // streams recorded on it, besides its own

  // To nothing; most blocks carry nothing but numbers.
  void reset() {
    requested = {};
    tag = 0;
    if (context != nullptr) context = nullptr;
    if (others != nullptr) others.reset();
  }
};

// Two cache lines, which no other block is on: blocks of two streams may be neighbours in the slab. On
// the first is all that a search of free blocks looks at.
struct alignas(kCacheLine) Block {
  DeviceAddr begin;
  Bytes size;
  // kLive: the front of its stream, if there is one. While it is set, only who holds the front's lock
  // changes it, `parked`, `use` or `list_next`, and only with the allocator's lock as well does the
  // block cease to be kLive.
  std::atomic<Front*> front{nullptr};
  Block* list_next = nullptr;  // kReady: the bin of the free index; kVoid: the heap's voids
  Block* list_prev = nullptr;
  Region* region = nullptr;
  Bytes held;  // kReady: bytes on handles that are in use, which therefore can't be given back
  std::uint32_t id = 0;
  BlockState state = BlockState::kVoid;
  bool parked = false;  // kLive to the heap, but the user has freed it (front.hpp)
  bool shared = false;  // other processes may use its memory until it is freed

  BlockUse use;
  Block* prev = nullptr;  // neighbours in the region, by address
  Block* next = nullptr;
  Heap* heap = nullptr;

  void reset() {
    region = nullptr;  // the rest is written when the record is used again
    use.reset();
    shared = false;
  }
  // Carries nothing but numbers, so that a front may end this use and begin another.
  bool is_simple() const { return use.others == nullptr && use.context == nullptr && !shared; }
  DeviceAddr end() const { return begin + size; }
  bool is_free() const { return state == BlockState::kReady || state == BlockState::kVoid; }
};

static_assert(sizeof(void*) != 8 || sizeof(Block) == 2 * kCacheLine);

// What a hit and a free look at comes first, on one line.
struct alignas(kCacheLine) Mapping {
  DeviceAddr begin;
  Handle* handle = nullptr;
  Region* region = nullptr;
  Stamp last_use;           // of this address
  std::uint32_t pages = 0;  // the handle's
  std::uint32_t uses = 0;
  std::uint32_t id = 0;
  Mapping* next_alias = nullptr;  // the handle's other mappings
  Heap* heap = nullptr;
  std::uint64_t mark = 0;  // the plan that drops this mapping

  bool is_home() const;
  Bytes size() const { return kPage * pages; }
  DeviceAddr end() const { return begin + size(); }
};

// What the search of a miss looks at comes first, on one line: it reads hundreds of handles.
struct alignas(kCacheLine) Handle {
  Stamp last_use;                 // of the memory, at whichever address
  IdleList* idle_list = nullptr;  // where it waits while it is idle
  Mapping* home = nullptr;
  std::uint64_t mark = 0;        // the search or plan that has looked at this handle
  std::uint32_t mark_place = 0;  // where the search saw it first
  std::uint32_t pages = 0;
  std::uint32_t id = 0;
  bool pinned = false;    // in a private pool or a plain segment: never moved while that lives
  bool kept = false;      // of a released pool, in place for a graph: see keep_in_place()
  bool small = false;     // counts as small in torch's statistics
  bool exported = false;  // the driver has a descriptor for it
  Handle* idle_prev = nullptr;

  Handle* idle_next = nullptr;
  std::uint64_t idle_since = 0;   // serial number; orders idle lists
  HandleId driver{};              // none for plain segments, which are freed by address
  Mapping* aliases = nullptr;     // all mappings, home included
  std::uint32_t alias_count = 0;  // mappings, home included
  ContextRef context;             // of what brought it to its home; only with a history

  Bytes size() const { return kPage * pages; }
  bool busy() const { return home != nullptr && home->uses > 0; }
  // Idle since before this serial number, and nobody has taken it.
  bool idle_before(std::uint64_t serial) const {
    return idle_list != nullptr && idle_since <= serial;
  }
};

inline bool Mapping::is_home() const { return handle->home == this; }

}  // namespace gpumemx
