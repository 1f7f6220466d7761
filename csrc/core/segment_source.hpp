// SPDX-License-Identifier: BSD-3-Clause
//
// Where a private pool's memory comes from when it is not the device: a third party's allocator. The
// core cuts and reuses the segments as it does its own plain ones, and gives each back to the source
// that it came from, also when the pool is long gone.
//
// Called with no lock of the allocator held, so a source may take any lock, and may use the allocator.
#pragma once

#include "base/result.hpp"
#include "base/units.hpp"

namespace gpumemx {

class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  // Memory that the work of any stream may use from now on. Fails: kOutOfMemory, or anything else.
  virtual Result<DeviceAddr> allocate(Bytes size) = 0;
  // REQUIRES: allocate() returned it, and all work that used it is complete. Must not fail.
  virtual void free(DeviceAddr address) = 0;
};

}  // namespace gpumemx
