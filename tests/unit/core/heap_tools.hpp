// SPDX-License-Identifier: BSD-3-Clause
//
// Heaps without an allocator: memory is brought to them by hand, no driver is called.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>

#include "core/heap.hpp"
#include "driver/sim/sim_driver.hpp"
#include "unit/core/core_tools.hpp"

namespace gpumemx {

class HeapFixture : public ::testing::Test {
 protected:
  HeapFixture() {
    set_.timeline = &line_;
    other_set_.timeline = &other_line_;
  }

  Heap& heap(HeapKind kind = HeapKind::kRest) { return set_.heap(kind, books_); }

  Handle* new_handle(std::uint32_t pages) {
    return books_.handles.add(HandleId{++last_handle_}, pages);
  }
  // An idle handle that stands nowhere.
  Handle* loose_handle(std::uint32_t pages, Stamp last_use = {}) {
    Handle* h = new_handle(pages);
    h->last_use = last_use;
    h->idle_since = books_.handles.next_serial();
    books_.handles.loose().push(h);
    return h;
  }

  // A live block of `size` at the open end of `where`, on new handles of these pages.
  Block* fill(Heap& where, Bytes size, std::initializer_list<std::uint32_t> pages) {
    EXPECT_TRUE(where.open_end(size));
    Region* region = where.regions().back();
    const DeviceAddr at = std::max(region->mapped_end, region->last->begin);
    DeviceAddr end = at;
    for (const std::uint32_t n : pages) end = end + kPage * n;
    Block* filling = where.begin_fill(at, end);
    DeviceAddr piece = at;
    for (const std::uint32_t n : pages) {
      where.install(filling, new_handle(n), piece);
      piece = piece + kPage * n;
    }
    return where.finish_fill(filling, at, size);
  }
  // The same, but free again.
  Block* ready(Heap& where, std::initializer_list<std::uint32_t> pages, Stamp stamp = {}) {
    Bytes size;
    for (const std::uint32_t n : pages) size += kPage * n;
    Block* block = fill(where, size, pages);
    const DeviceAddr at = block->begin;
    where.give(block, stamp);
    return block_at(where, at);
  }
  Block* block_at(Heap& where, DeviceAddr at) {
    return books_.arena.region_of(at)->heap == &where
               ? books_.arena.region_of(at)->block_covering(at, books_.blocks)
               : nullptr;
  }
  Handle* handle_at(DeviceAddr at) { return books_.arena.region_of(at)->mapping_at(at)->handle; }

  std::string broken(Heap& where) { return where.validate().value_or(""); }
  std::int64_t segments() { return books_.stats.segment.all().current; }
  std::int64_t held() { return books_.stats.inactive_split_bytes.all().current; }

  SimDriver gpu_;
  Books books_{gpu_, 64_GiB};
  Timeline line_{permanent({StreamId{1}, 0})}, other_line_{permanent({StreamId{2}, 1})};
  HeapSet set_, other_set_;
  std::uint64_t last_handle_ = 0;
};

}  // namespace gpumemx
