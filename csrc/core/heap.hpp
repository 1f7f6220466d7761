// SPDX-License-Identifier: BSD-3-Clause
//
// The blocks of one heap: where they begin and end, and which memory stands behind them. This is
// book-keeping only; which place to use is decided in placement.hpp and miss_plan.hpp, and the
// driver is called by the allocator.
//
// A heap belongs to a heap set: those of one stream in one pool. Everything that is kReady here is
// ordered on that stream, so it can be given to the stream's next request at once.
//
// Not thread-safe: guarded by the allocator's lock.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.hpp"
#include "core/free_index.hpp"
#include "core/front.hpp"
#include "core/handle_pool.hpp"
#include "core/history.hpp"
#include "core/records.hpp"
#include "core/segment_source.hpp"
#include "core/stats.hpp"

namespace gpumemx {

// What every heap of a device writes into.
struct Books {
  Books(DeviceDriver& driver, Bytes addresses) : arena(driver, addresses) {}

  Arena arena;
  Slab<Block> blocks;
  HandlePool handles;
  Stats stats;
  // Of each private pool; of one that is gone until reset_accumulated().
  std::map<PoolId, StatArray> reserved_by_pool;
  History history;
};

struct HeapSet {
  PoolId pool{};
  bool is_private = false;  // of a private pool: memory is pinned and never only ordered
  bool plain = false;       // a pool that asked for ordinary device allocations
  bool whole = false;       // ... of which each is one block
  std::shared_ptr<SegmentSource> source;  // ... which a third party makes
  Timeline* timeline = nullptr;
  std::unique_ptr<Front> front;  // of a permanent stream in the default pool; never goes
  IdleList idle;                 // handles last used here
  std::array<std::unique_ptr<Heap>, kHeapKinds> heaps;

  Heap& heap(HeapKind kind, Books& books);  // made at first use
  Heap* heap_if_any(HeapKind kind) const { return heaps[static_cast<std::size_t>(kind)].get(); }
};

class Heap {
 public:
  Heap(HeapSet& set, HeapKind kind, Books& books) : set_(set), kind_(kind), books_(books) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  HeapSet& set() const { return set_; }
  HeapKind kind() const { return kind_; }
  const FreeIndex& free() const { return free_; }
  const std::vector<Region*>& regions() const { return regions_; }

  // Makes the part [at, at + size) of a kReady block a kLive one.
  Block* take(Block* ready, DeviceAddr at, Bytes size);

  // Ends the use of a kLive or kPending block: its memory is kReady, last used at `stamp`.
  void give(Block* block, Stamp stamp);

  // Fresh addresses for a request of `size`, beyond all mappings of the last region or in a new one.
  // False when the arena has none left.
  bool open_end(Bytes size);

  // A plain device allocation of this heap; all of it becomes kReady.
  void add_segment(AddrRange range, Handle* handle);
  // REQUIRES: the handle is plain and has no uses. The caller frees the memory.
  AddrRange drop_segment(Handle* handle);

  // --- A miss in three steps. begin_fill() takes the free range [begin, end) away from everybody;
  // the memory that is ready in it counts as used. install() adds what the driver has mapped in it.
  // Then finish_fill() makes [at, at + size) the kLive block and the rest kReady, or cancel_fill()
  // gives back what there is.
  Block* begin_fill(DeviceAddr begin, DeviceAddr end);
  void install(Block* filling, Handle* handle, DeviceAddr at);
  Block* finish_fill(Block* filling, DeviceAddr at, Bytes size);
  void cancel_fill(Block* filling);

  // The handles of mappings in `range`, by address, give way to others that hold the same: `fresh` fill
  // all of it from now on. Pages that had no memory are in a filling. The old handles are in no list
  // then. REQUIRES: no free block stands there but what was just freed.
  void exchange(const std::vector<Mapping*>& old, const std::vector<Handle*>& fresh,
                AddrRange range);

  // Bytes that misses have created for this heap since one of them last used memory again.
  Bytes streak() const { return streak_; }
  void note_miss(Bytes created, bool used_again) {
    streak_ = used_again ? Bytes{} : streak_ + created;
  }

  // A dormant alias becomes its handle's home again. REQUIRES: the handle is idle.
  void make_home(Mapping* alias);
  // The handle stands nowhere; where it stood is kVoid and a dormant alias. REQUIRES: idle, has a
  // home (in any heap).
  static void leave_home(Handle* handle);
  // Forgets a mapping that is not a home; the caller has it unmapped.
  static void forget(Mapping* alias, Books& books);

  // Gives all regions back to the arena. REQUIRES: no block but kVoid ones, no mapping.
  void close();
  bool empty() const;  // no memory stands here and no block is in use

  Mapping* mapping_at(Region* region, DeviceAddr a) const {
    return region->range.contains(a) ? region->mapping_at(a) : nullptr;
  }

  // The first broken invariant of records.hpp in words, or nothing. O(everything).
  std::optional<std::string> validate() const;

 private:
  Block* add_block(Region* region, DeviceAddr begin, Bytes size, BlockState state);
  Block* cut(Block* block, DeviceAddr at);  // the upper part; both unlinked
  void join(Block* lower, Block* upper);    // both unlinked
  void link(Block* block);                  // into the free index, and its figures
  void unlink(Block* block);
  Block* isolate(Block* block, DeviceAddr begin, DeviceAddr end);  // relinks the rest
  Block* merge(Block* block);  // with neighbours of the same state; unlinked before and after
  void set_free_state(Block* block, BlockState state);  // merges and links
  Bytes held_bytes(const Block& block) const;
  void use(Block* block);
  void unuse(Block* block, const Stamp* stamp);
  void retire(Handle* handle);  // its last use ended
  void count_in_pool(const Handle& handle, bool comes);
  void segment_changed(Mapping* mapping, bool comes);
  void note(EventKind kind, AddrRange range, Handle& memory) const;

  template <class Visit>
  void for_each_mapping(const Block& block, Visit visit) const;

  HeapSet& set_;
  const HeapKind kind_;
  Books& books_;
  FreeIndex free_;
  std::vector<Region*> regions_;  // the last one has the open end
  Bytes streak_;
  Bytes addresses_;  // sum of the regions
};

}  // namespace gpumemx
