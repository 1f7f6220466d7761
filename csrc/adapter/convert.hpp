// SPDX-License-Identifier: BSD-3-Clause
//
// Our figures in torch's words. The only file that knows both vocabularies: live is torch's
// allocated, live and pending its active, held its inactive_split.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <map>
#include <string>
#include <vector>

#include "core/allocator.hpp"
#include "monitor/oom_report.hpp"

namespace gpumemx::adapter {

c10::cuda::CUDACachingAllocator::DeviceStats to_torch(
    c10::DeviceIndex device, const Stats& stats,
    const std::map<PoolId, StatArray>& reserved_by_pool);

std::vector<c10::cuda::CUDACachingAllocator::SegmentInfo> to_torch(c10::DeviceIndex device,
                                                                   const MemoryLayout& layout);

// torch's settings, for its snapshots: gpumemx.settings() tells which of them have work left.
c10::cuda::CUDACachingAllocator::AllocatorConfigInfo torch_settings();

// An address for a message. Not by operator<<: where libstdc++ is linked in a second time (seen on one
// machine), streams that print pointers call a function that is not there.
std::string text_of(const void* address);

// torch's own first sentences, which tools match, then why.
std::string out_of_memory_text(const OomReport& report);

}  // namespace gpumemx::adapter
