// SPDX-License-Identifier: BSD-3-Clause
//
// The addresses of one device, and what stands where. One large reservation is cut into slots of
// 1 GiB; heaps take runs of slots as regions. From an address to its slot is a shift, from there to
// the block that begins there and to the mapping of the page an index: no hash, no tree.
//
// The tables of blocks are by slot, made when something first begins in it; that of mappings is one
// for a region. They are large and nearly empty, so they come from calloc: host memory is used for
// the pages of a table that were touched.
//
// Plain device allocations lie outside of the reservation, each a region with tables of its own,
// found through an ordered map.
//
// Not thread-safe: guarded by the allocator's lock. Only find_unlocked() may be called by anybody at any
// time; what it walks is therefore kept while the arena lives, and used again.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/units.hpp"
#include "core/records.hpp"
#include "core/slab.hpp"
#include "driver/device_driver.hpp"

namespace gpumemx {

inline constexpr Bytes kSlot{1ull << 30};

// Block begins in up to 1 GiB of addresses from `base` (plain regions: any length).
class PageTable {
 public:
  PageTable(DeviceAddr base, Bytes size);

  // For other addresses, of the same size. REQUIRES: no block begins here.
  void move_to(DeviceAddr base) { base_ = base; }
  void set_block(DeviceAddr at, std::uint32_t block_id);
  void clear_block(DeviceAddr at);
  std::uint32_t block_at(DeviceAddr at) const { return blocks_[granule(at)]; }
  // The same by the number of a granule, without a lock: the block may be gone by now, but its record
  // was complete.
  std::uint32_t peek(std::size_t granule) const {
    return std::atomic_ref(blocks_[granule]).load(std::memory_order_acquire);
  }
  // The last block that begins at or before `at`, in this table; 0 when none does.
  std::uint32_t last_block_at_or_before(DeviceAddr at) const;

 private:
  std::size_t granule(DeviceAddr a) const { return (a - base_).n / kGranule.n; }

  DeviceAddr base_;
  std::size_t granules_;
  ZeroedArray<std::uint32_t> blocks_;
  // Which granules begin a block, then which words of the level below are not zero: a block that
  // covers an address is found in a few steps however far away it begins.
  static constexpr int kLevels = 3;
  std::array<ZeroedArray<std::uint64_t>, kLevels> begins_;
};

using TableSlot = std::atomic<PageTable*>;

// Tables of one slot each, used again by other slots: a reader without a lock may still be in one.
class TablePool {
 public:
  PageTable* take(DeviceAddr base);
  // REQUIRES: no block begins in it.
  void give_back(PageTable* table) { spare_.push_back(table); }

 private:
  std::vector<std::unique_ptr<PageTable>> tables_;
  std::vector<PageTable*> spare_;
};

struct Region {
  // In slots of the arena, whose `slots` and `pool` the tables of blocks are.
  Region(AddrRange addresses, Heap* owner, TableSlot* slots, TablePool* pool);
  // One plain device allocation.
  Region(AddrRange addresses, Heap* owner);

  AddrRange range;
  Heap* heap = nullptr;
  Block* first = nullptr;
  Block* last = nullptr;
  DeviceAddr mapped_end;  // no mapping reaches beyond; may be too high, never too low
  bool plain = false;
  std::uint64_t serial = 0;     // of all regions, in the order of their making
  ZeroedArray<Mapping*> pages;  // what is mapped there, by page

  PageTable* table_if_any(DeviceAddr a) const { return table_at(index(a)); }
  PageTable& table(DeviceAddr a);  // made at first use
  Mapping* mapping_at(DeviceAddr a) const { return pages[page(a)]; }
  void set_mapping(AddrRange whole_pages, Mapping* mapping) {
    std::fill_n(&pages[page(whole_pages.begin)], whole_pages.size.n / kPage.n, mapping);
  }
  // Lowers mapped_end to where the last mapping really ends, but not below `floor`.
  void tighten_mapped_end(DeviceAddr floor) {
    while (mapped_end > floor && mapping_at(mapped_end - kPage) == nullptr) {
      mapped_end = mapped_end - kPage;
    }
  }
  // REQUIRES: a lies in the region.
  Block* block_covering(DeviceAddr a, const Slab<Block>& blocks) const;
  // Gives the tables back. REQUIRES: no block begins in the region; it is in slots.
  void drop_tables();

 private:
  PageTable* table_at(std::size_t i) const {
    return plain ? own_table_.get() : slots_[i].load(std::memory_order_relaxed);
  }
  std::size_t page(DeviceAddr a) const { return (a - range.begin).n / kPage.n; }
  std::size_t index(DeviceAddr a) const { return plain ? 0 : (a - range.begin).n / kSlot.n; }

  TableSlot* slots_ = nullptr;  // not plain: one a slot
  TablePool* pool_ = nullptr;
  std::unique_ptr<PageTable> own_table_;  // plain: one in all
};

class Arena {
 public:
  // Reserves `size` of addresses, or the half of it, and so on down to one slot; none at all when
  // the driver refuses even that (then take() fails).
  Arena(DeviceDriver& driver, Bytes size);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  AddrRange range() const { return range_; }
  // The driver is going away and takes the addresses back itself: no call is made to it any more.
  void abandon() { range_.size = {}; }

  // A region of at least `size`, its first block not made yet; null when no run of slots is long
  // enough. The arena owns it until give_back().
  Region* take(Bytes size, Heap* heap);
  Region* add_plain(AddrRange range, Heap* heap);
  void give_back(Region* region);

  // The block that begins at `a`, in any state; null for anything else, ours or not.
  Block* find(DeviceAddr a, const Slab<Block>& blocks) const;
  // The same without a lock, but for plain memory. The record may be another block's by now: look at it
  // again under the lock that guards it.
  Block* find_unlocked(DeviceAddr a, const Slab<Block>& blocks) const {
    const std::uint64_t offset = a.n - range_.begin.n;
    if (offset >= range_.size.n || offset % kGranule.n != 0) return nullptr;
    const PageTable* table = table_slots_[offset / kSlot.n].load(std::memory_order_acquire);
    if (table == nullptr) return nullptr;
    const std::uint32_t id = table->peek(offset % kSlot.n / kGranule.n);
    return id == 0 ? nullptr : blocks.at(id);
  }
  // The region that `a` lies in, or null.
  Region* region_of(DeviceAddr a) const;

 private:
  DeviceDriver& driver_;
  AddrRange range_;
  std::vector<Region*> slots_;                // by (address - base) / slot size
  std::unique_ptr<TableSlot[]> table_slots_;  // the tables of blocks, likewise
  TablePool tables_;
  std::size_t next_fit_ = 0;                                // where the last search ended
  std::map<std::uint64_t, std::unique_ptr<Region>> plain_;  // by first address
  std::vector<std::unique_ptr<Region>> regions_;
  std::uint64_t last_serial_ = 0;
};

}  // namespace gpumemx
