// SPDX-License-Identifier: BSD-3-Clause
//
// From an address to the block that begins there: a hash table of numbers of blocks, open addressing,
// at most half full. A table by address would be an index instead of a hash, but blocks begin all over
// the device's memory: its lines would be in no near cache, and every allocation would wait for one. So
// few blocks as there are fit in 8 B each.
//
// Not thread-safe: used under the allocator's lock. Only peek() may be called by anybody at any time: it
// may miss a block that is being moved to another place, and may find another one; whoever uses it
// looks again under the lock that guards the record. Tables that were outgrown are therefore kept; all
// of them together are as large as the last one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/check.hpp"
#include "base/units.hpp"
#include "core/records.hpp"
#include "core/size_classes.hpp"
#include "core/slab.hpp"

namespace gpumemx {

class BlockMap {
 public:
  BlockMap() { grow(); }
  BlockMap(const BlockMap&) = delete;
  BlockMap& operator=(const BlockMap&) = delete;

  // REQUIRES: no block is known to begin at `at`, or less than 512 B away. Number 0 is no block's.
  void insert(DeviceAddr at, std::uint32_t id) {
    if (++count_ * 2 > newest().mask + 1) grow();
    put(newest(), tag_of(at), id);
  }

  // REQUIRES: insert(at, id).
  void erase(DeviceAddr at, std::uint32_t id) {
    const Table& table = newest();
    const Entry gone{tag_of(at), id};
    std::uint32_t hole = table.home(gone.tag);
    while (table.at(hole) != gone) {
      GPUMEMX_CHECK(table.at(hole).id != 0, "a block ends that is not in the table of blocks");
      hole = table.after(hole);
    }
    // What comes after the hole and was pushed there because its own place was taken moves up.
    for (std::uint32_t i = table.after(hole);; i = table.after(i)) {
      const Entry entry = table.at(i);
      if (entry.id == 0) break;
      const bool may_move = ((i - table.home(entry.tag)) & table.mask) >= ((i - hole) & table.mask);
      if (!may_move) continue;
      table.set(hole, entry);
      hole = i;
    }
    table.set(hole, {});
    --count_;
  }

  // The block that begins at `at`, or null.
  Block* find(DeviceAddr at, const Slab<Block>& blocks) const {
    const Table& table = newest();
    const std::uint32_t tag = tag_of(at);
    for (std::uint32_t i = table.home(tag);; i = table.after(i)) {
      const Entry entry = table.at(i);
      if (entry.id == 0) return nullptr;
      if (entry.tag != tag) continue;
      Block* block = blocks.at(entry.id);
      if (block->begin == at) return block;
    }
  }

  // The same without a lock: a block that may begin at `at`, or may have.
  Block* peek(DeviceAddr at, const Slab<Block>& blocks) const {
    const Table& table = newest();
    const std::uint32_t tag = tag_of(at);
    for (std::uint32_t i = table.home(tag);; i = table.after(i)) {
      const Entry entry = table.at(i);
      if (entry.id == 0) return nullptr;
      if (entry.tag == tag) return blocks.at(entry.id);
    }
  }

 private:
  struct Entry {
    std::uint32_t tag =
        0;                 // the low bits of the granule's number: those of two blocks may be equal
    std::uint32_t id = 0;  // 0: nothing here
    friend bool operator==(Entry, Entry) = default;
  };
  struct Table {
    explicit Table(int bits)
        : entries(new std::atomic<Entry>[std::size_t{1} << bits]),
          mask((1u << bits) - 1),
          shift(32 - bits) {}

    std::uint32_t home(std::uint32_t tag) const { return tag * 0x9E3779B1u >> shift; }
    std::uint32_t after(std::uint32_t i) const { return (i + 1) & mask; }
    // Whoever finds a number without a lock finds the record that was written before.
    Entry at(std::uint32_t i) const { return entries[i].load(std::memory_order_acquire); }
    void set(std::uint32_t i, Entry e) const { entries[i].store(e, std::memory_order_release); }

    const std::unique_ptr<std::atomic<Entry>[]> entries;
    const std::uint32_t mask;
    const int shift;
  };

  static constexpr int kFirstBits = 10;
  static constexpr int kMostBits = 31;

  static std::uint32_t tag_of(DeviceAddr at) {
    return static_cast<std::uint32_t>(at.n / kGranule.n);
  }
  const Table& newest() const { return *newest_.load(std::memory_order_acquire); }

  static void put(const Table& table, std::uint32_t tag, std::uint32_t id) {
    std::uint32_t i = table.home(tag);
    while (table.at(i).id != 0) i = table.after(i);
    table.set(i, {tag, id});
  }

  void grow() {
    const int bits = kFirstBits + static_cast<int>(tables_.size());
    GPUMEMX_CHECK(bits <= kMostBits, "the allocator's table of blocks is full");
    auto larger = std::make_unique<Table>(bits);
    if (!tables_.empty()) {
      const Table& old = newest();
      for (std::uint32_t i = 0; i <= old.mask; ++i) {
        const Entry entry = old.at(i);
        if (entry.id != 0) put(*larger, entry.tag, entry.id);
      }
    }
    newest_.store(larger.get(), std::memory_order_release);
    tables_.push_back(std::move(larger));
  }

  std::atomic<Table*> newest_{nullptr};
  std::vector<std::unique_ptr<Table>> tables_;
  std::uint64_t count_ = 0;
};

}  // namespace gpumemx
