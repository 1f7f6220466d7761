// SPDX-License-Identifier: BSD-3-Clause
//
// Where in a heap a block could stand: on memory that is ready (a hit), or where memory would have
// to be brought first (candidates of a miss). Looks only; changes nothing.
//
// The measure is waste: bytes of idle handles that the block would make busy, beyond its own size.
// Those can then not be used elsewhere or given back. A block that fits into the free part of busy
// handles wastes less than nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/heap.hpp"
#include "core/policy.hpp"

namespace gpumemx {

struct Hit {
  Block* block;
  DeviceAddr at;
  std::int64_t waste;  // bytes
};

// The best of the first Options::hit_scan free blocks from the request's own size bin upwards, each
// tried at both ends and at both ends rounded to pages. O(1): only the handles at a block's two ends
// can be shared. An exact fit ends the search.
std::optional<Hit> find_hit(const Heap& heap, Bytes size, int scan);

struct Candidate {
  double key;  // waste in MiB + price x driver cost
  std::uint64_t pages_pinned;
  Bytes run;  // the free run it lies in; an open end counts as endless
  DeviceAddr at;
  DeviceAddr run_end;
  Region* region;
};

// Places for a block of `size` in free runs of `heap`, cheapest first: the smallest runs that fit and
// the open end; in each of them both ends, the ends of what is ready and the begins of dormant
// aliases, each also rounded to pages.
class CandidateSearch {
 public:
  // REQUIRES: heap.open_end(size) was true.
  const std::vector<Candidate>& find(const Heap& heap, Bytes size, const Policy& policy,
                                     HandlePool& handles);

 private:
  struct Run {
    Block* first;
    DeviceAddr begin, end;
    bool open;
  };
  void collect_runs();
  void search_run(const Run& run);
  void from(const Run& run, DeviceAddr begin);  // a block that begins here, or at the next page
  void upto(const Run& run, DeviceAddr end);    // that ends here, or at the page before
  void evaluate(const Run& run, DeviceAddr at);

  const Heap* heap_ = nullptr;
  Bytes size_;
  const Policy* policy_ = nullptr;
  HandlePool* handles_ = nullptr;
  double handle_pages_ = 1;
  double price_ = 0;
  std::vector<Run> runs_;
  std::vector<Candidate> found_;
};

// Whether an idle handle may be used on the heap set's stream: what was queued on it before is
// ordered on that stream, or complete. A private pool takes only what is complete.
bool usable_by(const Handle& handle, const HeapSet& set);

// Whether a dormant alias can be its handle's home again for this set.
bool can_switch(const Mapping& alias, const HeapSet& set);

}  // namespace gpumemx
