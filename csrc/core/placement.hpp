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
#include <span>
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
//
// A place that needs no handle and wastes little is as good as a hit: it ends the search, and the longer
// the search, the more it may waste (Policy::switch_waste()).
//
// There are hundreds of places and a block can lie on hundreds of pages, so a run is read once, into
// stretches with running sums, and the price of a place is the difference of two of them. Most runs are
// not worth more than the reading: where a place that needs no driver call is known already, another
// one must be as cheap.
class CandidateSearch {
 public:
  // All of them, whatever was found first: the open end is among them, which always serves.
  static constexpr std::size_t kAllPlaces = SIZE_MAX;

  // The cheapest `most` places in order. REQUIRES: heap.open_end(size) was true.
  std::span<const Candidate> find(const Heap& heap, Bytes size, const Policy& policy,
                                  HandlePool& handles, std::size_t most);

 private:
  struct Run {
    Block* first;
    Block* last;
    DeviceAddr begin, end;
    bool open;
    // What read_run() has found:
    Bytes longest_row;  // of pages that need no driver call
    std::size_t first_stretch, stretch_count;
  };
  enum class Ground : std::uint8_t {
    kEmpty,    // nothing is mapped
    kHome,     // ready memory
    kSwitch,   // a dormant alias that can be used again
    kStale,    // a mapping that has to go first
    kBlocked,  // one that can't go yet
  };
  // What holds for all that lies before a stretch of a run.
  struct Sums {
    std::uint64_t missing = 0;  // pages without usable memory
    std::uint64_t pinned = 0;   // pages of the handles that a block there would make busy
    std::uint32_t gaps = 0;     // begins of stretches of missing pages
    std::uint32_t stale = 0, switches = 0, blocked = 0;
  };
  struct Stretch {
    DeviceAddr begin, end;
    Handle* handle = nullptr;  // that the mapping here is of
    Ground ground = Ground::kEmpty;
    bool idle = false;  // nothing in use stands on the mapping
    Sums before;        // from sum_up() on
  };
  struct Twin {  // a handle that stands in the run twice, so that sums count it twice
    std::size_t first, second;
  };

  void collect_runs();
  void read_run(Run& run);
  bool can_win(const Run& run) const;
  void search_run(const Run& run);
  void sum_up();
  void from(const Run& run, DeviceAddr begin);  // a block that begins here, or at the next page
  void upto(const Run& run, DeviceAddr end);    // that ends here, or at the page before
  void evaluate(const Run& run, DeviceAddr at);
  std::optional<Sums> sums_of(std::size_t first, std::size_t last, DeviceAddr begin,
                              DeviceAddr end) const;
  std::optional<Sums> sums_by_page(const Run& run, DeviceAddr begin, DeviceAddr end);

  const Heap* heap_ = nullptr;
  Bytes size_;
  const Policy* policy_ = nullptr;
  HandlePool* handles_ = nullptr;
  double handle_pages_ = 1;
  double price_ = 0;
  double repoint_cost_ = 0;
  double sure_ = 0;  // the least key of a place that needs no handle
  std::vector<Run> runs_;
  std::vector<Stretch> stretches_;  // of the runs read so far, those of a run by address
  std::span<Stretch> read_;         // of the run that is looked at
  Sums total_;                      // of all of these
  std::vector<Twin> twins_;
  std::vector<Candidate> found_;
};

// Whether an idle handle may be used on the heap set's stream: what was queued on it before is
// ordered on that stream, or complete. A private pool takes only what is complete.
bool usable_by(const Handle& handle, const HeapSet& set);

// Whether a dormant alias can be its handle's home again for this set.
bool can_switch(const Mapping& alias, const HeapSet& set);

}  // namespace gpumemx
