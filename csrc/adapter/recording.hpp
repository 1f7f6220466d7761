// SPDX-License-Identifier: BSD-3-Clause
//
// The memory history for programs without Python: on, off, and a snapshot as the bytes of the file
// that torch.cuda.memory._dump_snapshot() would write. Works on whichever allocator torch has.
#pragma once

#include <cstddef>
#include <string>

namespace gpumemx::adapter {

// Starts anew: what was recorded before is dropped. `stacks`: with the C++ stack of every event, which
// costs some microseconds each. With torch's own allocator this starts CUDA.
void start_recording(std::size_t max_entries, bool stacks);
// What is recorded stays until the next start.
void stop_recording();
bool is_recording();

// REQUIRES: the allocator has started.
std::string pickled_snapshot();

}  // namespace gpumemx::adapter
