// SPDX-License-Identifier: BSD-3-Clause
//
// The addresses of one device, and what stands where. One large reservation is cut into slots of
// 1 GiB; heaps take runs of slots as regions. From an address to its slot is a shift, from there to the
// mapping of the page an index; the block that begins there is found in a hash table (block_map.hpp),
// the one that covers it through bits that say where blocks begin.
//
// The bits are by slot, made when something first begins in it; the mappings are one table for a region.
// They are large and nearly empty, so they come from calloc: host memory is used for the pages of a
// table that were touched.
//
// Plain device allocations lie outside of the reservation, each a region with tables of its own,
// found through an ordered map.
//
// Not thread-safe: guarded by the allocator's lock. Only find_unlocked() may be called by anybody at any
// time.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/units.hpp"
#include "core/block_map.hpp"
#include "core/records.hpp"
#include "core/slab.hpp"
#include "driver/device_driver.hpp"

namespace gpumemx {

inline constexpr Bytes kSlot{1ull << 30};

// Where blocks begin in up to 1 GiB of addresses from `base` (plain regions: any length).
class BlockBegins {
 public:
  BlockBegins(DeviceAddr base, Bytes size);

  void set(DeviceAddr at);
  void clear(DeviceAddr at);
  bool has(DeviceAddr at) const;
  // The last begin at or before `at` in these addresses, if there is one.
  std::optional<DeviceAddr> last_at_or_before(DeviceAddr at) const;

 private:
  std::size_t granule(DeviceAddr a) const { return (a - base_).n / kGranule.n; }

  DeviceAddr base_;
  // A bit for each granule that begins a block, then for each word of the level below that is not zero:
  // a block that covers an address is found in a few steps however far away it begins.
  static constexpr int kLevels = 3;
  std::array<ZeroedArray<std::uint64_t>, kLevels> levels_;
};

struct Region {
  // `plain`: one plain device allocation, else slots of the arena. `map`: of all blocks.
  Region(AddrRange addresses, Heap* owner, BlockMap& map, bool plain);

  AddrRange range;
  Heap* heap = nullptr;
  Block* first = nullptr;
  Block* last = nullptr;
  DeviceAddr mapped_end;  // no mapping reaches beyond; may be too high, never too low
  bool plain = false;
  std::uint64_t serial = 0;     // of all regions, in the order of their making
  ZeroedArray<Mapping*> pages;  // what is mapped there, by page

  // REQUIRES: the block begins here, and is not known to do so.
  void add_begin(const Block& block) {
    begins(block.begin).set(block.begin);
    map_.insert(block.begin, block.id);
  }
  // REQUIRES: add_begin(block).
  void remove_begin(const Block& block) {
    begins(block.begin).clear(block.begin);
    map_.erase(block.begin, block.id);
  }
  Block* block_at(DeviceAddr a, const Slab<Block>& blocks) const { return map_.find(a, blocks); }
  // Whether add_begin() was called for a block at `a`, as far as block_covering() knows.
  bool has_begin(DeviceAddr a) const;
  // REQUIRES: a lies in the region.
  Block* block_covering(DeviceAddr a, const Slab<Block>& blocks) const;

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

 private:
  BlockBegins& begins(DeviceAddr a) {  // made at first use
    auto& slot = begins_[index(a)];
    if (slot == nullptr) make_begins(index(a));
    return *slot;
  }
  void make_begins(std::size_t slot);
  std::size_t page(DeviceAddr a) const { return (a - range.begin).n / kPage.n; }
  std::size_t index(DeviceAddr a) const { return plain ? 0 : (a - range.begin).n / kSlot.n; }

  BlockMap& map_;
  std::vector<std::unique_ptr<BlockBegins>> begins_;  // one a slot; plain: one in all
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
  Block* find(DeviceAddr a, const Slab<Block>& blocks) const { return map_.find(a, blocks); }
  // The same without a lock, but for plain memory. The record may be another block's by now, and a block
  // may be missed: look again under the lock that guards it.
  Block* find_unlocked(DeviceAddr a, const Slab<Block>& blocks) const {
    return range_.contains(a) ? map_.peek(a, blocks) : nullptr;
  }
  // The region that `a` lies in, or null.
  Region* region_of(DeviceAddr a) const;

 private:
  DeviceDriver& driver_;
  AddrRange range_;
  std::vector<Region*> slots_;  // by (address - base) / slot size
  BlockMap map_;
  std::size_t next_fit_ = 0;                                // where the last search ended
  std::map<std::uint64_t, std::unique_ptr<Region>> plain_;  // by first address
  std::vector<std::unique_ptr<Region>> regions_;
  std::uint64_t last_serial_ = 0;
};

}  // namespace gpumemx
