// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/convert.hpp"

#include "base/text.hpp"

namespace gpumemx::adapter {

namespace torch_alloc = c10::cuda::CUDACachingAllocator;

namespace {

void copy(const StatArray& from, c10::CachingAllocator::StatArray& to) {
  // The order of parts is torch's: all, small, large.
  for (std::size_t i = 0; i < from.part.size(); ++i) {
    to[i].current = from.part[i].current;
    to[i].peak = from.part[i].peak;
    to[i].allocated = from.part[i].allocated;
    to[i].freed = from.part[i].freed;
  }
}

}  // namespace

torch_alloc::DeviceStats to_torch(const Stats& stats) {
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
  return out;
}

std::vector<torch_alloc::SegmentInfo> to_torch(c10::DeviceIndex device,
                                               const std::vector<BlockInfo>& blocks) {
  std::vector<torch_alloc::SegmentInfo> segments;
  const BlockInfo* before = nullptr;
  for (const BlockInfo& b : blocks) {
    const bool goes_on = before != nullptr && before->address + before->size == b.address &&
                         before->stream == b.stream && before->pool == b.pool &&
                         before->heap == b.heap && !is_plain(b.heap);
    const bool same_plain = before != nullptr && is_plain(b.heap) && before->heap == b.heap &&
                            before->segment == b.segment;
    if (!goes_on && !same_plain) {
      torch_alloc::SegmentInfo segment;
      segment.device = device;
      segment.address = b.address.n;
      segment.stream = reinterpret_cast<void*>(b.stream.native);  // NOLINT: a CUstream
      segment.is_large = !is_small(b.heap);
      segment.is_expandable = !is_plain(b.heap);
      segment.owner_private_pool_id = {0, static_cast<c10::CaptureId_t>(b.pool)};
      segment.registration_counter = static_cast<std::int32_t>(segments.size());
      segments.push_back(std::move(segment));
    }
    torch_alloc::SegmentInfo& segment = segments.back();
    torch_alloc::BlockInfo block;
    block.size = b.size.n;
    block.requested_size = b.requested.n;
    block.allocated = b.state == BlockState::kLive;
    block.active = b.state != BlockState::kReady;
    segment.total_size += block.size;
    if (block.allocated) segment.allocated_size += block.size;
    if (block.active) {
      segment.active_size += block.size;
      segment.requested_size += block.requested_size;
    }
    segment.blocks.push_back(std::move(block));
    before = &b;
  }
  return segments;
}

std::string out_of_memory_text(c10::DeviceIndex device, const OomVerdict& v) {
  std::string text = "CUDA out of memory. Tried to allocate " + format_bytes(v.requested) +
                     ". GPU " + std::to_string(static_cast<int>(device));
  if (v.device_known) {
    text += " has a total capacity of " + format_bytes(v.device_total) + " of which " +
            format_bytes(v.device_free) + " is free.";
  } else {
    text += ": the device did not say how much it has.";
  }
  if (v.cap < v.device_total) text += " " + format_bytes(v.cap) + " allowed.";
  text += " Of the allocated memory " + format_bytes(v.live + v.pending) +
          " is allocated by PyTorch, ";
  if (v.in_private_pools.n != 0) {
    text += "with " + format_bytes(v.in_private_pools) +
            " allocated in private pools (e.g., CUDA Graphs), ";
  }
  text += "and " + format_bytes(v.reserved - v.live - v.pending) +
          " is reserved by PyTorch but unallocated. [gpumemx] ";
  return text + v.text();
}

}  // namespace gpumemx::adapter
