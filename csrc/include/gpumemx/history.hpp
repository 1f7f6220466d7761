// SPDX-License-Identifier: BSD-3-Clause
//
// The history of allocations, and snapshots of it in torch's file format.
#pragma once

#include <cstddef>
#include <gpumemx/export.hpp>
#include <string>

namespace gpumemx {

/// What is recorded.
struct HistoryOptions {
  /// The newest events that are kept on each device.
  std::size_t max_entries = 100'000;
  /// Whether the C++ stack of every event is taken, which costs some microseconds each. Without, a
  /// snapshot says what was allocated and when, but not where in the program.
  bool stacks = true;
};

/// Starts recording every allocation and free on all devices, anew: what was recorded before is dropped.
/// torch's own allocator has no history before CUDA has started, so there this starts it.
///
/// @throws std::invalid_argument max_entries is 0.
GPUMEMX_API void enable_history(const HistoryOptions& options = {});

/// Stops recording and drops what was recorded: save_snapshot() goes before it.
GPUMEMX_API void disable_history();

/// Whether a history is recorded.
GPUMEMX_API bool history_enabled();

/// Writes what is allocated now, and the history if there is one, to a file as
/// torch.cuda.memory._dump_snapshot() does: `gpumemx analyze FILE` and pytorch.org/memory_viz read it.
/// Takes seconds when there are stacks: their names are looked up now.
///
/// @throws std::logic_error CUDA has not started.
/// @throws std::system_error the file cannot be written.
GPUMEMX_API void save_snapshot(const std::string& path);

}  // namespace gpumemx
