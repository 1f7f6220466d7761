// SPDX-License-Identifier: BSD-3-Clause
//
// Memory shared between processes, in the bytes that torch's own allocator writes and reads, so that
// either side may be torch as it is:
//
//   byte 0  version: 2 up to torch 2.12, 3 from 2.13 on
//   byte 1  'c': a 64-byte cudaIpcMemHandle_t of a device allocation
//           'e': header { int32 pid, 4 bytes 0, uint64 handle size, uint64 handles; from version 3 on
//                also int32 kind (1 descriptors, 2 fabric), 4 bytes 0 }, then for each handle its int32
//                descriptor in the process `pid`, or 64 bytes
//           'g': gpumemx's own, for handles of several sizes: the 'e' header of version 3 with a handle
//                size of 0 and kind 1, then for each handle its uint64 size, int32 descriptor, 4 bytes 0
//
// A string of 64 bytes is a bare cudaIpcMemHandle_t. Numbers are as the machine has them: both sides are
// on one machine. The receiver takes descriptors with pidfd_getfd(), as torch does.
//
// What torch does above: a consumer counts down in a shared file when it is done, and the producer's
// block is freed only after that; an event makes the consumer's stream wait for the producer's work. A
// consumer that is killed never counts down: its blocks stay in use until the producer ends.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "runtime/registry.hpp"

namespace gpumemx::adapter {

// What this process has mapped of others: each shared string once, as long as somebody holds it.
class SharedMemory {
 public:
  // Throws c10::Error with what to do, as open() does. REQUIRES: `address` lies in memory of `device`.
  static c10::cuda::CUDACachingAllocator::ShareableHandle share(Device& device, DeviceAddr address);

  // On the current CUDA device, which is `device`. The memory is unmapped with the last copy.
  std::shared_ptr<void> open(Device& device, const std::string& bytes) GPUMEMX_EXCLUDES(mu_);

  // Where each begins that is open, of all devices. Its size is the driver's to tell.
  std::vector<DeviceAddr> open_addresses() const GPUMEMX_EXCLUDES(mu_);

 private:
  struct Opened {
    std::weak_ptr<void> memory;
    // Kept apart: a lock() of `memory` might become its last holder, and unmap it.
    DeviceAddr begin;
  };

  mutable Mutex mu_;  // held while something is opened, so that it is opened once
  std::map<std::string, Opened> opened_ GPUMEMX_GUARDED_BY(mu_);
};

}  // namespace gpumemx::adapter
