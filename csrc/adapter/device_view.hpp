// SPDX-License-Identifier: BSD-3-Clause
//
// One device's memory as seen through whichever allocator torch has: gpumemx when it is installed,
// else torch's own, whose figures say less. Reading never starts CUDA: before it has started,
// everything is zero.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adapter/install.hpp"
#include "monitor/scope.hpp"

namespace gpumemx::adapter {

// The device that the calling thread works on; 0 before CUDA has started.
int current_device();

// All of a device by cause. torch's own allocator does not say which streams are waited for, and what
// clear_cache() would give back of its expandable segments is at most what is told.
struct DeviceReport {
  MemoryReport memory;
  std::vector<c10::MempoolId_t> pool_names;  // torch's, of memory.pools
  std::optional<Bytes> workspaces;           // of live: cuBLAS's; nothing: not known
  Bytes earlier;  // not in `memory`: reserved by torch's own allocator before a late installation
};

// All addresses at which torch's allocators, ours and its own, may have memory, on all devices, and where
// what other processes share begins (one byte of each: the driver knows how long it is). What torch's own
// allocator has opened of other processes it does not tell.
std::vector<AddrRange> address_ranges();

class DeviceView {
 public:
  // Throws c10::IndexError (IndexError in Python) where CUDA has started and has no such device.
  explicit DeviceView(int device);

  int device() const { return device_; }
  bool exact() const { return ours_ != nullptr; }
  // Whether either allocator has started: before, all figures are 0.
  bool started() const;
  MemoryFigures figures() const;
  // Asks more, and may wait for a request of another thread that is inside the driver. REQUIRES: not in a
  // capture of this thread; Python's lock is not held.
  DeviceReport report() const;
  std::string summary() const;
  // Gives back what is cached until `target` bytes are reserved, or nothing more can go. torch's own
  // allocator knows only all or nothing.
  TrimReport trim(Bytes target, bool wait) const;
  // All of it, and what was to come back. torch's own always waits for queued work.
  TrimReport clear_cache(bool wait) const { return trim({}, wait); }
  Stats stats() const;                   // zeros where gpumemx has not opened the device
  DriverFigures driver_figures() const;  // the same

 private:
  int device_;
  Device* ours_;
};

// The same as DeviceView::clear_cache() for every device that has memory. Its index, and what came of it.
std::vector<std::pair<int, TrimReport>> clear_caches(bool wait);

// A scope on one device, of either allocator. With torch's own the peak inside is known only when it
// is a new peak of the process; else it is the larger of the two ends, which may be too low; and of
// the driver's calls only cudaMalloc and cudaFree are counted, without their time.
class Scope {
 public:
  // `from_start`: began before anything was allocated, though it can be measured only from now on.
  explicit Scope(int device, bool from_start = false);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  ScopeFigures read();
  ScopeFigures end();  // once; later calls return the same
  bool exact() const { return exact_; }
  std::string report(const std::string& name);  // with a line about what is not known

 private:
  void read_torch(torch_alloc::CUDAAllocator& torch);

  int device_;
  bool exact_;
  ScopeBoard* board_;
  ScopeBoard::Open* open_ = nullptr;
  bool ended_ = false;
  ScopeFigures figures_;
  Bytes torch_peak_before_;
  std::int64_t torch_allocations_before_ = 0;
  std::int64_t torch_calls_before_ = 0;
};

}  // namespace gpumemx::adapter
