// SPDX-License-Identifier: BSD-3-Clause
//
// Where a device's memory is, and giving back what is cached. Works on gpumemx and on torch's own
// allocator, whose figures say less. All sizes are bytes.
#pragma once

#include <cstdint>
#include <gpumemx/export.hpp>
#include <optional>
#include <string>

namespace gpumemx {

/// The device that the calling thread works on; 0 before CUDA has started.
inline constexpr int kCurrentDevice = -1;

/// One device's memory at one moment.
///
/// `total = reserved + others + free` and `reserved = live + pending + cached + held`. Where the device
/// could not be asked (device_known is false) total, others and free are 0.
struct MemoryInfo {
  int device = 0;         ///< Index of the device.
  std::string allocator;  ///< Whose figures these are: "gpumemx", "torch", or "none" (not started).
  std::uint64_t total = 0;  ///< The card's memory.
  std::uint64_t free = 0;   ///< What the driver could still hand out.
  std::uint64_t others =
      0;  ///< What this allocator did not reserve: context, libraries, processes.
  std::uint64_t reserved = 0;  ///< What the allocator has taken from the card.
  std::uint64_t live = 0;      ///< In tensors, rounded up to 512 B each.
  std::uint64_t pending = 0;   ///< Freed, but another stream may still use it.
  std::uint64_t cached = 0;    ///< Unused: serves new requests; clear_cache() gives it back.
  std::uint64_t held = 0;      ///< Unused, but tied to something in use: cannot be given back.
  std::uint64_t largest_free =
      0;  ///< The largest block that is ready; 0 with torch's own allocator.
  std::optional<std::uint64_t>
      cap;                    ///< The most that this process may reserve, if that is limited.
  bool device_known = false;  ///< Whether total, others and free are known.
};

/// Says where a device's memory is. Asks the driver for the card's free memory (some microseconds) and
/// waits for nothing; starts no CUDA. Any thread, but not while a CUDA graph is captured.
///
/// @throws std::out_of_range CUDA has started and has no such device.
GPUMEMX_API MemoryInfo memory_info(int device = kCurrentDevice);

/// The same as a table of at most 72 columns and a sentence about the state; no newline at the end.
/// docs/reading-a-report.md explains every line.
///
/// @throws std::out_of_range CUDA has started and has no such device.
GPUMEMX_API std::string memory_summary(int device = kCurrentDevice);

/// What was given back and, by reason, what stayed. All parts add up to what was reserved before.
struct Released {
  int device = 0;              ///< Index of the device.
  std::uint64_t released = 0;  ///< Given back to the card.
  std::uint64_t live = 0;      ///< Stayed: in tensors, or freed while another stream may use it.
  std::uint64_t held = 0;  ///< Stayed: unused, but shares a piece of memory with something in use.
  std::uint64_t pending =
      0;                    ///< Stayed: queued work may still touch it, and a capture is under way.
  std::uint64_t pools = 0;  ///< Stayed: in private pools (CUDA graphs) that are in use.
  std::uint64_t kept = 0;   ///< Stayed: unused, within what trim_to() was to leave.
  std::string text;         ///< The same in words.
};

/// Gives unused memory back to the card. Waits for queued work that may still touch it.
///
/// Rarely makes a program faster or smaller, since unused memory serves new requests: useful before
/// another process, or a library with an allocator of its own, needs the card. With torch's own
/// allocator it takes all devices.
///
/// @throws std::out_of_range CUDA has started and has no such device.
GPUMEMX_API Released clear_cache(int device = kCurrentDevice);

/// The same, but stops as soon as `bytes` or less are reserved, so that a server keeps what its next
/// request needs. torch's own allocator gives back everything as soon as it has more than that.
///
/// @throws std::out_of_range CUDA has started and has no such device.
GPUMEMX_API Released trim_to(std::uint64_t bytes, int device = kCurrentDevice);

}  // namespace gpumemx
