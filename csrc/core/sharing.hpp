// SPDX-License-Identifier: BSD-3-Clause
//
// What other processes need to reach a block, and what this one needs of theirs.
//
// stock torch's receivers map n handles of one size side by side, so the handles under a shared block
// must all be of one size. A block rarely has that by itself: the last handle of a gap is cut to it.
// When it is first shared, the handles that do not fit are replaced by others, in place and with the
// same content (DeviceAllocator::share). plan_uniform() decides which, and by what, so that the blocks
// beside can be shared too.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "base/units.hpp"
#include "driver/device_driver.hpp"

namespace gpumemx {

struct SharedHandle {
  Bytes size;
  int descriptor = -1;  // the driver's: not to be closed
};

struct SharedRange {
  AddrRange range;                    // whole handles, all of the block in it
  std::vector<SharedHandle> handles;  // by address; none: `range` is one ordinary device allocation

  // Whether a receiver that knows one size only can map it.
  bool is_uniform() const {
    for (const SharedHandle& h : handles) {
      if (h.size != handles.front().size) return false;
    }
    return true;
  }
};

// A handle as another process exported it: a descriptor (the caller's), or a fabric handle.
struct ForeignHandle {
  Bytes size;
  std::variant<int, FabricHandle> handle;
};

// A handle under the block or near it, or a page there that is free to be mapped.
struct BackingPart {
  std::uint32_t pages = 0;
  bool is_void = false;
  bool fixed = false;        // another shared block stands on it: its memory may not be replaced
  bool has_others = false;   // other blocks in use stand on it, whose owners know nothing of this
  bool is_exported = false;  // costs nothing to export again
};

// What a block beside will need when it is shared itself, measured in pages from a border towards its far
// end: handles that end no nearer than `from` and no farther than `to`, of so many pages where that is not
// 0. Blocks that follow and share pages with each other are taken as one: so do their handles.
struct Demand {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::uint32_t pages = 0;
};

// The block beside a border between two pages.
struct Neighbour {
  bool is_across = false;        // it stands on both
  std::optional<Demand> demand;  // of its far end, measured from the border
};

// A block and what is around it. Places are pages, counted from the first part.
struct ShareSite {
  std::vector<BackingPart> parts;  // by address; handles under it can reach no farther
  std::uint64_t begin = 0;         // of the block: from its first page
  std::uint64_t end = 0;           // to behind its last
  bool fills_first = true;         // nothing else can stand on these two
  bool fills_last = true;
  // At the borders outwards from the block's first page, and from its last. May be shorter.
  std::vector<Neighbour> before;
  std::vector<Neighbour> after;
  // Where others may stand on what is exported, handles of so many pages at multiples of it are better
  // than others, so that the next share agrees. `origin`: what to add to a place to find multiples.
  std::uint32_t grid = 1;
  std::uint64_t origin = 0;
};

struct UniformPlan {
  std::uint32_t pages = 0;     // of every handle under the block afterwards
  std::size_t keep_front = 0;  // parts that stay at either end;
  std::size_t keep_back = 0;   // those between are replaced
  // By these, in pages, by address. Those at the ends that are of another size are not under the block.
  std::vector<std::uint32_t> created;
  bool disturbs_others = false;
  bool in_the_way = false;   // a neighbour can't be shared in this way any more
  bool is_optional = false;  // the handles are of one size already: it is for the neighbours' sake

  bool is_nothing() const { return created.empty(); }
};

// How to get handles of one size under the block: nothing to do where they are; else the cheapest in
// driver time and memory that leaves the neighbours shareable. Nothing when other shared blocks forbid it.
std::optional<UniformPlan> plan_uniform(const ShareSite& site);

}  // namespace gpumemx
