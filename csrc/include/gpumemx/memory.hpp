// SPDX-License-Identifier: BSD-3-Clause
//
// Where a device's memory is, and giving back what is cached. Works on gpumemx and on torch's own
// allocator, whose figures say less. All sizes are bytes.
#pragma once

#include <cstdint>
#include <gpumemx/export.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gpumemx {

/// The device that the calling thread works on; 0 before CUDA has started.
inline constexpr int kCurrentDevice = -1;

/// A private pool: of CUDA graphs, or a MemPool.
struct PoolMemory {
  std::pair<std::uint64_t, std::uint64_t> id;  ///< As torch has it.
  bool in_use = false;  ///< False: nobody holds it any more, but some of its memory is in use.
  std::uint64_t reserved = 0;  ///< What it has taken from the card.
  std::uint64_t live = 0;      ///< Of that, in tensors.
};

/// One device's memory at one moment, as far as the allocator knows it. (Which processes use the rest
/// is told in Python, from NVML.)
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
  std::uint64_t reserved = 0;   ///< What the allocator has taken from the card.
  std::uint64_t live = 0;       ///< In tensors, rounded up to 512 B each.
  std::uint64_t pending = 0;    ///< Freed, but another stream may still use it.
  std::uint64_t cached = 0;     ///< Unused: serves new requests; clear_cache() gives it back.
  std::uint64_t held = 0;       ///< Unused, but tied to something in use: cannot be given back.
  std::uint64_t requested = 0;  ///< Of live: what was asked for; the rest is rounding.
  std::optional<std::uint64_t>
      workspaces;             ///< Of live: cuBLAS's workspaces, kept by torch; none: not known.
  std::uint64_t waiting = 0;  ///< Of cached: queued work may still touch it.
  std::uint64_t held_by_live = 0;           ///< Of held: beside blocks in use.
  std::uint64_t held_by_pending = 0;        ///< Of held: beside pending blocks.
  std::uint64_t held_by_pools = 0;          ///< Of held: in private pools.
  std::vector<PoolMemory> pools;            ///< The private pools.
  std::uint64_t in_pools = 0;               ///< Of reserved: in private pools, whatever its state.
  std::uint64_t releasable = 0;             ///< What clear_cache() would give back now.
  std::uint64_t releasable_by_waiting = 0;  ///< The same with its `wait`.
  std::uint64_t largest_free =
      0;  ///< The largest block that is ready; 0 with torch's own allocator.
  std::optional<std::uint64_t>
      cap;                    ///< The most that this process may reserve, if that is limited.
  bool device_known = false;  ///< Whether total, others and free are known.
};

/// Says where a device's memory is. Asks the driver for the card's free memory and the streams how far
/// they are, and waits for none of them (but for another thread's request that is inside the driver);
/// takes time in proportion to the number of blocks; starts no CUDA. Any thread, but not while a CUDA
/// graph is captured.
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
  int device = 0;               ///< Index of the device.
  std::uint64_t predicted = 0;  ///< clear_cache(): what was to come back, told before it was done.
  std::uint64_t released = 0;   ///< Given back to the card.
  std::uint64_t live = 0;       ///< Stayed: in tensors, or freed while another stream may use it.
  std::uint64_t held = 0;  ///< Stayed: unused, but shares a piece of memory with something in use.
  std::uint64_t pending = 0;  ///< Stayed: queued work may still touch it (`wait` waits for that).
  std::uint64_t pools = 0;    ///< Stayed: in private pools (CUDA graphs) that are in use.
  std::uint64_t kept = 0;     ///< Stayed: unused, within what trim_to() was to leave.
  std::string text;           ///< The same in words.
};

/// Gives unused memory back to the card. What queued work may still touch stays, unless `wait` says to
/// wait for that work: then all of it is with the driver on return. (torch's own allocator always waits.)
///
/// Rarely makes a program faster or smaller, since unused memory serves new requests: useful before
/// another process, or a library with an allocator of its own, needs the card. With torch's own
/// allocator it takes all devices.
///
/// @throws std::out_of_range CUDA has started and has no such device.
GPUMEMX_API Released clear_cache(int device = kCurrentDevice, bool wait = false);

/// The same, but stops as soon as `bytes` or less are reserved, so that a server keeps what its next
/// request needs. torch's own allocator gives back everything as soon as it has more than that.
///
/// @throws std::out_of_range CUDA has started and has no such device.
GPUMEMX_API Released trim_to(std::uint64_t bytes, int device = kCurrentDevice, bool wait = false);

}  // namespace gpumemx
