// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/device_view.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <map>

#include "adapter/blas_workspaces.hpp"
#include "adapter/pool_names.hpp"
#include "monitor/summary.hpp"

namespace gpumemx::adapter {

namespace {

// torch's own allocator when it is in charge and has started, else null.
torch_alloc::CUDAAllocator* torchs_own() {
  torch_alloc::CUDAAllocator* current = torch_alloc::get();
  if (current == nullptr || current == installed() || !current->initialized()) return nullptr;
  return current;
}

Bytes bytes(std::int64_t n) { return {static_cast<std::uint64_t>(std::max<std::int64_t>(n, 0))}; }

// How many devices there are, as far as that is known without starting CUDA; else 0.
int known_devices() {
  if (installed() != nullptr) return DeviceRegistry::instance().device_count();
  return torchs_own() == nullptr ? 0 : c10::cuda::device_count();
}

// The segments of torch's own allocator. REQUIRES: it has started.
std::vector<torch_alloc::SegmentInfo> segments_of(torch_alloc::CUDAAllocator& torch) {
  return torch.snapshot({0, 0}, /*include_traces=*/false).segments;
}

// The part of the report that only torch's list of its blocks tells.
void add_segments(DeviceReport& report, int device, torch_alloc::CUDAAllocator& torch) {
  MemoryReport& m = report.memory;
  const auto workspaces = blas_workspaces();
  if (workspaces) report.workspaces = Bytes{};
  std::map<c10::MempoolId_t, PoolShare> pools;
  for (const torch_alloc::SegmentInfo& segment : segments_of(torch)) {
    if (segment.device != device) continue;
    const bool in_pool = segment.owner_private_pool_id != c10::MempoolId_t{0, 0};
    DeviceAddr at{segment.address};
    Bytes live, inactive;
    for (const torch_alloc::BlockInfo& block : segment.blocks) {
      const Bytes size{block.size};
      if (block.allocated) {
        live += size;
        m.figures.live_requested += {block.requested_size};
        if (workspaces && std::binary_search(workspaces->begin(), workspaces->end(), at)) {
          *report.workspaces += size;
        }
      }
      if (!block.active) inactive += size;
      at = at + size;
    }
    if (in_pool) {
      PoolShare& pool = pools[segment.owner_private_pool_id];
      pool.users = 1;
      pool.reserved += {segment.total_size};
      pool.live += live;
      m.figures.in_private_pools += {segment.total_size};
    } else if (segment.is_expandable || inactive.n == segment.total_size) {
      m.releasable += inactive;
    }
  }
  for (const auto& [name, pool] : pools) {
    m.pools.push_back(pool);
    report.pool_names.push_back(name);
  }
  m.releasable = std::min(m.releasable, m.figures.idle);
  m.releasable_by_waiting = m.releasable;
  m.held_by.live = m.figures.held;
  // Read a moment apart.
  m.figures.live_requested = std::min(m.figures.live_requested, m.figures.live);
}

}  // namespace

std::vector<AddrRange> address_ranges() {
  std::vector<AddrRange> ranges;
  const DeviceRegistry& devices = DeviceRegistry::instance();
  for (int i = 0; i < DeviceRegistry::kMaxDevices && installed() != nullptr; ++i) {
    const Device* device = devices.if_open(i);
    if (device == nullptr) continue;
    const auto own = device->allocator->address_ranges();
    ranges.insert(ranges.end(), own.begin(), own.end());
  }
  if (installed() != nullptr) {
    for (const DeviceAddr begin : installed()->shared_addresses()) ranges.push_back({begin, {1}});
  }
  torch_alloc::CUDAAllocator* torch =
      installed() != nullptr ? installed()->earlier() : torchs_own();
  if (torch != nullptr) {
    for (const torch_alloc::SegmentInfo& segment : segments_of(*torch)) {
      ranges.push_back({{segment.address}, {segment.total_size}});
    }
  }
  return ranges;
}

int current_device() {
  const int count = known_devices();
  return count <= 1 ? 0 : c10::cuda::current_device();
}

DeviceView::DeviceView(int device)
    : device_(device),
      ours_(installed() != nullptr ? DeviceRegistry::instance().if_open(device) : nullptr) {
  const int count = known_devices();
  TORCH_CHECK_INDEX(device >= 0 && (count == 0 || device < count),
                    "gpumemx: there is no CUDA device ", device, "; this process has ", count);
}

bool DeviceView::started() const { return ours_ != nullptr || torchs_own() != nullptr; }

MemoryFigures DeviceView::figures() const {
  if (ours_ != nullptr) return ours_->allocator->memory_figures();
  MemoryFigures f;
  f.cap = {~0ull};
  torch_alloc::CUDAAllocator* torch = torchs_own();
  if (torch == nullptr) return f;
  const auto device = static_cast<c10::DeviceIndex>(device_);
  const auto stats = torch->getDeviceStats(device);
  f.reserved = bytes(stats.reserved_bytes[0].current);
  f.live = bytes(stats.allocated_bytes[0].current);
  f.pending = bytes(stats.active_bytes[0].current) - f.live;
  f.held = bytes(stats.inactive_split_bytes[0].current);
  f.idle = f.reserved - std::min(f.reserved, f.live + f.pending + f.held);
  const auto [free, total] = torch->getMemoryInfo(device);
  f.device_known = total >= free + f.reserved.n;
  if (f.device_known) {
    f.device_total = {total};
    f.device_free = {free};
    f.others = {total - free - f.reserved.n};
  }
  return f;
}

DeviceReport DeviceView::report() const {
  DeviceReport report;
  if (ours_ == nullptr) {
    report.memory.figures = figures();
    if (auto* torch = torchs_own()) add_segments(report, device_, *torch);
    return report;
  }
  const auto workspaces = blas_workspaces();
  DeviceAllocator& allocator = *ours_->allocator;
  report.memory = allocator.memory_report();
  for (const PoolShare& pool : report.memory.pools) {
    report.pool_names.push_back(
        PoolNames::instance().of(static_cast<c10::DeviceIndex>(device_), pool.pool));
  }
  if (workspaces) {
    Bytes size;
    for (const DeviceAddr address : *workspaces) {
      if (const auto block = allocator.find_block(address)) size += block->size;
    }
    report.workspaces = std::min(size, report.memory.figures.live);
  }
  if (torch_alloc::CUDAAllocator* torch =
          installed() == nullptr ? nullptr : installed()->earlier()) {
    const auto stats = torch->getDeviceStats(static_cast<c10::DeviceIndex>(device_));
    report.earlier = std::min(bytes(stats.reserved_bytes[0].current), report.memory.figures.others);
  }
  return report;
}

std::string DeviceView::summary() const {
  std::string note;
  if (!exact()) {
    const std::string gpu = "GPU " + std::to_string(device_);
    if (installed() != nullptr) return gpu + ": nothing was allocated there yet.\n";
    if (torchs_own() == nullptr) return gpu + ": CUDA has not started, nothing is reserved.\n";
    note =
        "These are torch's own figures; with its expandable segments, held memory counts as "
        "cached. Install gpumemx for exact ones.";
  } else if (installed()->was_late()) {
    note = "Blocks from before the late installation belong to torch's own allocator: others.";
  }
  const DeviceReport all = report();
  return summary_table(device_, exact() ? "gpumemx" : "torch", all.memory,
                       all.workspaces.value_or(Bytes{}), note);
}

namespace {

// What emptying torch's own cache should bring, and then what it did.
class Expected {
 public:
  Expected(const DeviceView& view, torch_alloc::CUDAAllocator& torch) {
    report_.memory.figures = view.figures();
    add_segments(report_, view.device(), torch);
  }
  const MemoryFigures& figures() const { return report_.memory.figures; }

  // `is_enough`: nothing was to go.
  TrimReport compare_with(const MemoryFigures& after, bool is_enough) const {
    TrimReport report;
    report.predicted = is_enough ? Bytes{} : report_.memory.releasable;
    report.released = figures().reserved - std::min(figures().reserved, after.reserved);
    report.live = after.live + after.pending;
    report.held = after.held + (is_enough ? Bytes{} : after.idle);
    report.wanted = is_enough ? after.idle : Bytes{};
    return report;
  }

 private:
  DeviceReport report_;
};

}  // namespace

TrimReport DeviceView::trim(Bytes target, bool wait) const {
  if (ours_ != nullptr) {
    return ours_->allocator->trim({std::nullopt, target, wait, /*predict=*/target.n == 0});
  }
  torch_alloc::CUDAAllocator* torch = torchs_own();
  if (torch == nullptr) return {};
  const Expected before(*this, *torch);
  const bool is_enough = target.n != 0 && before.figures().reserved <= target;
  if (!is_enough) torch->emptyCache({0, 0});
  return before.compare_with(figures(), is_enough);
}

std::vector<std::pair<int, TrimReport>> clear_caches(bool wait) {
  std::vector<std::pair<int, TrimReport>> reports;
  if (installed() != nullptr) {
    for (int i = 0; i < known_devices(); ++i) {
      const DeviceView view(i);
      if (view.figures().reserved.n != 0) reports.emplace_back(i, view.clear_cache(wait));
    }
    return reports;
  }
  torch_alloc::CUDAAllocator* torch = torchs_own();
  if (torch == nullptr) return reports;
  // It empties them all at once.
  std::vector<std::pair<int, Expected>> before;
  for (int i = 0; i < known_devices(); ++i) {
    Expected here(DeviceView(i), *torch);
    if (here.figures().reserved.n != 0) before.emplace_back(i, std::move(here));
  }
  torch->emptyCache({0, 0});
  for (const auto& [i, here] : before) {
    reports.emplace_back(i, here.compare_with(DeviceView(i).figures(), /*is_enough=*/false));
  }
  return reports;
}

Stats DeviceView::stats() const { return ours_ != nullptr ? ours_->allocator->stats() : Stats{}; }

Scope::Scope(int device, bool from_start)
    : device_(device),
      exact_(installed() != nullptr),
      board_(exact_ ? DeviceRegistry::instance().scopes(device) : nullptr) {
  if (board_ != nullptr) {
    open_ = board_->begin(from_start);
    return;
  }
  const MemoryFigures now = DeviceView(device).figures();
  if (from_start) return;
  figures_.before = figures_.after = figures_.peak = now.live;
  if (torch_alloc::CUDAAllocator* torch = torchs_own()) {
    const auto stats = torch->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    torch_peak_before_ = bytes(stats.allocated_bytes[0].peak);
    torch_allocations_before_ = stats.allocation[0].allocated;
    torch_calls_before_ = stats.num_device_alloc + stats.num_device_free;
  }
}

DriverFigures DeviceView::driver_figures() const {
  return ours_ == nullptr ? DriverFigures{} : ours_->counting->figures();
}

Scope::~Scope() { (void)end(); }

void Scope::read_torch(torch_alloc::CUDAAllocator& torch) {
  const auto since = [](std::int64_t now, std::int64_t before) {
    return static_cast<std::uint64_t>(std::max<std::int64_t>(0, now - before));
  };
  const auto stats = torch.getDeviceStats(static_cast<c10::DeviceIndex>(device_));
  figures_.after = bytes(stats.allocated_bytes[0].current);
  figures_.peak = std::max(figures_.peak, figures_.after);
  const Bytes peak = bytes(stats.allocated_bytes[0].peak);
  if (peak > torch_peak_before_) figures_.peak = std::max(figures_.peak, peak);
  figures_.allocations = since(stats.allocation[0].allocated, torch_allocations_before_);
  figures_.driver_calls =
      since(stats.num_device_alloc + stats.num_device_free, torch_calls_before_);
}

ScopeFigures Scope::read() {
  if (ended_) return figures_;
  if (board_ == nullptr && installed() != nullptr) {  // opened since, by the first allocation
    board_ = DeviceRegistry::instance().scopes(device_);
    if (board_ != nullptr) open_ = board_->begin(/*from_start=*/true);
  }
  if (board_ != nullptr) return board_->read(open_);
  if (torch_alloc::CUDAAllocator* torch = torchs_own()) read_torch(*torch);
  return figures_;
}

std::string Scope::report(const std::string& name) {
  const ScopeFigures figures = read();
  if (exact_) return describe(name, figures);
  return describe_memory(name, figures) + ", " + std::to_string(figures.driver_calls) +
         " calls of cudaMalloc and cudaFree\nOn torch's own allocator the peak is known only where "
         "it "
         "is a new peak of the process, and the driver's time is not known.";
}

ScopeFigures Scope::end() {
  if (ended_) return figures_;
  figures_ = read();
  if (board_ != nullptr) figures_ = board_->end(open_);
  ended_ = true;
  return figures_;
}

}  // namespace gpumemx::adapter
