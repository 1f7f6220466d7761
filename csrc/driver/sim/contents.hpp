// SPDX-License-Identifier: BSD-3-Clause
//
// What stands in one piece of physical memory: a tag for every 512 B granule, and which operation
// wrote it. Kept as runs of equal granules, so that a write over a whole handle costs what a write
// over one granule does.
//
// Invariants: runs_ is never empty and ascends strictly in `begin`; the first begins at 0; a run
// ends where the next begins, the last at the end of the memory.
#pragma once

#include <cstdint>
#include <vector>

#include "base/units.hpp"

namespace gpumemx {

class Contents {
 public:
  static constexpr std::uint64_t kGranule = 512;

  // The write that left a tag; its range is of addresses, as the writer named them.
  struct Writer {
    std::uint64_t serial = 0;  // 0: never written
    StreamId stream{};
    AddrRange range;
  };
  struct Run {
    std::uint64_t begin = 0;  // in granules
    std::uint64_t tag = 0;
    Writer writer;
  };

  explicit Contents(Bytes size);

  // Offsets in bytes; every granule that the range touches counts. REQUIRES: size is positive and
  // the range lies in the memory.
  void write(std::uint64_t offset, std::uint64_t size, std::uint64_t tag, const Writer& writer);
  // The first run in the range that holds another tag or was never written; null when there is
  // none. Valid until the next write.
  const Run* find_other(std::uint64_t offset, std::uint64_t size, std::uint64_t tag) const;

  // The runs of a range, the first and last cut to it. REQUIRES: offset and size are whole granules.
  std::vector<Run> runs_in(std::uint64_t offset, std::uint64_t size) const;

  std::size_t run_count() const { return runs_.size(); }

 private:
  std::uint64_t granules_;
  std::vector<Run> runs_;
};

}  // namespace gpumemx
