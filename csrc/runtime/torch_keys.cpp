// SPDX-License-Identifier: BSD-3-Clause
#include "runtime/torch_keys.hpp"

#include <array>

namespace gpumemx {
namespace {

struct TorchKey {
  std::string_view name;
  std::string_view note;
};

constexpr std::string_view kHostNote =
    "torch's own: it belongs to the allocator of pinned host memory, which gpumemx leaves alone.";

constexpr std::array kTorchKeys{
    TorchKey{"per_process_memory_fraction",
             "kept: the share of the device's memory that this process may reserve at first."},
    TorchKey{"backend", "kept: gpumemx answers to native, the one value that goes with it."},
    TorchKey{"throw_on_cudamalloc_oom",
             "kept: a request that would grow beyond the memory fraction fails at once."},
    TorchKey{"graph_capture_record_stream_reuse",
             "not in this version: inside a capture nothing is reused by the graph's shape."},
    TorchKey{"max_split_size_mb",
             "no work left: splitting a large block costs nothing where free pages of any address "
             "serve the next one."},
    TorchKey{"max_non_split_rounding_mb",
             "no work left: it is the slack of blocks that max_split_size_mb keeps whole."},
    TorchKey{
        "expandable_segments",
        "no work left: memory is mapped page by page in any case (mode:plain turns that off)."},
    TorchKey{"expandable_segments_reserve",
             "no work left: there is one reservation of addresses a device, not one a segment."},
    TorchKey{"expandable_segments_reserve_by_class",
             "no work left: there is one reservation of addresses a device, not one a segment."},
    TorchKey{"roundup_power2_divisions",
             "no work left: sizes need not be alike for their memory to be reused."},
    TorchKey{"garbage_collection_threshold",
             "no work left: idle memory is used again at other addresses before more is taken."},
    TorchKey{"large_segment_size_mb", "no work left: there are no segments of a fixed size."},
    TorchKey{"release_lock_on_cudamalloc",
             "no work left: a request that finds free memory waits for no driver call of another."},
    TorchKey{"release_lock_on_hipmalloc",
             "no work left: a request that finds free memory waits for no driver call of another."},
    TorchKey{"pinned_use_background_threads", kHostNote},
    TorchKey{"pinned_use_cuda_host_register", kHostNote},
    TorchKey{"pinned_use_hip_host_register", kHostNote},
    TorchKey{"pinned_num_register_threads", kHostNote},
    TorchKey{"pinned_reserve_segment_size_mb", kHostNote},
    TorchKey{"pinned_free_catch_all", kHostNote},
};

}  // namespace

std::optional<std::string_view> torch_note(std::string_view key) {
  for (const TorchKey& known : kTorchKeys) {
    if (known.name == key) return known.note;
  }
  return std::nullopt;
}

}  // namespace gpumemx
