// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/convert.hpp"

#include <array>
#include <cstdio>

#include "adapter/history.hpp"
#include "adapter/pool_names.hpp"
#include "base/text.hpp"

namespace gpumemx::adapter {

namespace {

void copy(const StatArray& from, c10::CachingAllocator::StatArray& to) {
  // The order of parts is torch's: all, small, large.
  for (std::size_t i = 0; i < from.part.size(); ++i) {
    to[i].current = from.part[i].current;
    to[i].peak = from.part[i].peak;
    to[i].allocated = from.part[i].allocated;
    to[i].freed = from.part[i].freed();
  }
}

// Fields that not every torch has.
template <class DeviceStats>
void fill_newer(DeviceStats& out, c10::DeviceIndex device, const Stats& stats,
                const std::map<PoolId, StatArray>& reserved_by_pool) {
  if constexpr (requires { out.reserved_bytes_by_private_pools; }) {
    for (const auto& [pool, reserved] : reserved_by_pool) {
      copy(reserved, out.reserved_bytes_by_private_pools[PoolNames::instance().of(device, pool)]);
    }
  }
  if constexpr (requires { out.num_oom_rejections; }) {
    out.num_oom_rejections = static_cast<std::int64_t>(stats.num_oom_rejections);
  }
}

}  // namespace

torch_alloc::DeviceStats to_torch(c10::DeviceIndex device, const Stats& stats,
                                  const std::map<PoolId, StatArray>& reserved_by_pool) {
  torch_alloc::DeviceStats out;
  copy(stats.allocation, out.allocation);
  copy(stats.segment, out.segment);
  copy(stats.active, out.active);
  copy(stats.inactive_split, out.inactive_split);
  copy(stats.allocated_bytes, out.allocated_bytes);
  copy(stats.reserved_bytes, out.reserved_bytes);
  copy(stats.active_bytes, out.active_bytes);
  copy(stats.inactive_split_bytes, out.inactive_split_bytes);
  copy(stats.requested_bytes, out.requested_bytes);
  out.num_alloc_retries = static_cast<std::int64_t>(stats.num_alloc_retries);
  out.num_ooms = static_cast<std::int64_t>(stats.num_ooms);
  out.num_sync_all_streams = static_cast<std::int64_t>(stats.num_sync_all_streams);
  out.num_device_alloc = static_cast<std::int64_t>(stats.num_device_alloc);
  out.num_device_free = static_cast<std::int64_t>(stats.num_device_free);
  out.max_split_size = -1;  // torch's own value for "not limited"
  fill_newer(out, device, stats, reserved_by_pool);
  return out;
}

std::vector<torch_alloc::SegmentInfo> to_torch(c10::DeviceIndex device,
                                               const MemoryLayout& layout) {
  std::vector<torch_alloc::SegmentInfo> segments;
  segments.reserve(layout.segments.size());
  for (const SegmentInfo& s : layout.segments) {
    torch_alloc::SegmentInfo& segment = segments.emplace_back();
    segment.device = device;
    segment.address = s.range.begin.n;
    segment.stream = reinterpret_cast<void*>(s.stream.native);  // NOLINT: a CUstream
    segment.is_large = !is_small(s.heap);
    segment.is_expandable = !is_plain(s.heap);
    segment.owner_private_pool_id = PoolNames::instance().of(device, s.pool);
    // Orders the segments of a pool in the same way in all processes that did the same.
    segment.registration_counter = static_cast<std::int32_t>(s.serial);
    segment.context_when_allocated = gathered(s.context);
    segment.blocks.reserve(s.count);
    for (std::size_t i = s.first; i < s.first + s.count; ++i) {
      const BlockInfo& b = layout.blocks[i];
      torch_alloc::BlockInfo& block = segment.blocks.emplace_back();
      block.size = b.size.n;
      block.requested_size = b.requested.n;
      block.allocated = b.state == BlockState::kLive;
      block.active = b.state != BlockState::kReady;
      block.context_when_allocated = gathered(b.context);
      segment.total_size += block.size;
      if (block.allocated) segment.allocated_size += block.size;
      if (block.active) {
        segment.active_size += block.size;
        segment.requested_size += block.requested_size;
      }
    }
  }
  return segments;
}

namespace {

// Fields that not every torch has.
template <class Settings, class Config = c10::CachingAllocator::AcceleratorAllocatorConfig>
void fill_newer(Settings& settings) {
  if constexpr (requires { settings.max_round_threshold; }) {
    settings.max_round_threshold = Config::pinned_max_round_threshold();
    settings.max_cached_size = Config::pinned_max_cached_size();
  }
}

}  // namespace

torch_alloc::AllocatorConfigInfo torch_settings() {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  using CudaConfig = torch_alloc::CUDAAllocatorConfig;
  torch_alloc::AllocatorConfigInfo info{};
  info.garbage_collection_threshold = Config::garbage_collection_threshold();
  info.max_split_size = Config::max_split_size();
  info.pinned_num_register_threads = CudaConfig::pinned_num_register_threads();
  info.expandable_segments = Config::use_expandable_segments();
  info.release_lock_on_malloc = CudaConfig::release_lock_on_cudamalloc();
  info.pinned_use_host_register = CudaConfig::pinned_use_cuda_host_register();
  info.graph_capture_record_stream_reuse = CudaConfig::graph_capture_record_stream_reuse();
  info.last_allocator_settings = c10::CachingAllocator::getAllocatorSettings();
  info.roundup_power2_divisions = Config::roundup_power2_divisions();
  fill_newer(info);
  return info;
}

// As torch writes sizes: programs look for its words in this text.
std::string torch_size(Bytes size) {
  constexpr std::array<std::pair<std::uint64_t, const char*>, 3> kUnits{
      {{1ull << 10, " KiB"}, {1ull << 20, " MiB"}, {1ull << 30, " GiB"}}};
  if (size.n <= kUnits[0].first) return std::to_string(size.n) + " bytes";
  std::size_t unit = 0;
  while (unit + 1 < kUnits.size() && size.n > kUnits[unit + 1].first) ++unit;
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.2f%s",
                static_cast<double>(size.n) / static_cast<double>(kUnits[unit].first),
                kUnits[unit].second);
  return text.data();
}

std::string text_of(const void* address) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%p", address);
  return text.data();
}

std::string out_of_memory_text(const OomReport& report) {
  const OomVerdict& v = report.verdict;
  if (v.rejected) {
    return "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
           "per_process_memory_fraction limit. Requested size: " +
           torch_size(v.requested) + " (GPU " + std::to_string(report.device) + ", " +
           torch_size(v.reserved) + " reserved of " + torch_size(v.cap) +
           " allowed). Set throw_on_cudamalloc_oom:false to disable. [gpumemx] " + report.text();
  }
  std::string text = "CUDA out of memory. Tried to allocate " + torch_size(v.requested) + ". GPU " +
                     std::to_string(report.device);
  if (v.device_known) {
    text += " has a total capacity of " + torch_size(v.device_total) + " of which " +
            torch_size(v.device_free) + " is free.";
  } else {
    text += ": the device did not say how much it has.";
  }
  if (v.cap < v.device_total) text += " " + torch_size(v.cap) + " allowed.";
  text +=
      " Of the allocated memory " + torch_size(v.live + v.pending) + " is allocated by PyTorch, ";
  if (v.in_private_pools.n != 0) {
    text += "with " + torch_size(v.in_private_pools) +
            " allocated in private pools (e.g., CUDA Graphs), ";
  }
  text += "and " + torch_size(v.reserved - v.live - v.pending) +
          " is reserved by PyTorch but unallocated. [gpumemx] ";
  return text + report.text();
}

}  // namespace gpumemx::adapter
