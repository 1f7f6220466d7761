// SPDX-License-Identifier: BSD-3-Clause
//
// Named regions of a program and what they did to one device's memory. Scopes nest and overlap, also
// across threads; each knows the peak inside itself, and none disturbs another's or torch's.
//
// How: the allocator keeps one peak since it was last asked (take_interval_peak()). The board asks
// at every begin and end, and gives the answer to all scopes that are open.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "core/allocator.hpp"
#include "driver/counting_driver.hpp"

namespace gpumemx {

// All threads of the process count. Sizes are of blocks: rounded to 512 B.
struct ScopeFigures {
  Bytes before;  // allocated when it began
  Bytes after;   // allocated when it ended; until then, when last asked
  Bytes peak;    // the most allocated inside
  std::uint64_t allocations = 0;
  std::uint64_t driver_calls = 0;  // that change what memory is where, and plain allocations
  double driver_seconds = 0;       // all driver time, made by whichever thread

  std::int64_t delta() const {
    return static_cast<std::int64_t>(after.n) - static_cast<std::int64_t>(before.n);
  }
};

class ScopeBoard {
 public:
  // Keeps references; one board an allocator.
  ScopeBoard(DeviceAllocator& allocator, const CountingDriver& driver)
      : allocator_(allocator), driver_(driver) {}

  struct Open;
  // Costs two counter reads; never the driver. `from_start`: as if begun before the device's first
  // allocation, for a scope that was there before the device was opened.
  Open* begin(bool from_start = false) GPUMEMX_EXCLUDES(mu_);
  ScopeFigures read(Open* scope) GPUMEMX_EXCLUDES(mu_);  // so far; the scope stays open
  ScopeFigures end(Open* scope) GPUMEMX_EXCLUDES(mu_);   // frees it

 private:
  void settle() GPUMEMX_REQUIRES(mu_);

  DeviceAllocator& allocator_;
  const CountingDriver& driver_;
  Mutex mu_;
  std::vector<Open*> open_ GPUMEMX_GUARDED_BY(mu_);
  Bytes whole_peak_ GPUMEMX_GUARDED_BY(mu_);  // since the device was opened
};

// "train step: peak 3.20 GiB, kept +1.10 GiB"
std::string describe_memory(const std::string& name, const ScopeFigures& figures);
// The same and ", 12 driver calls in 0.4 ms"
std::string describe(const std::string& name, const ScopeFigures& figures);

}  // namespace gpumemx
