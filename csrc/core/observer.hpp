// SPDX-License-Identifier: BSD-3-Clause
//
// The only way up from the core: what it asks or tells others. Called with no lock of the allocator
// held, so an observer may call the allocator.
#pragma once

#include "core/oom.hpp"

namespace gpumemx {

struct PressureInfo {
  Bytes requested;
  StreamRef stream;
  PoolId pool{};
  int attempt = 0;    // 1 for the first time this request asks
  Bytes device_free;  // 0 when the device could not be asked
  Bytes cached;       // idle here
};

class Observer {
 public:
  virtual ~Observer() = default;
  // A request can't be served; nothing that the allocator could do itself is left. True: something
  // was freed, the request is tried once more. Must not throw.
  virtual bool on_pressure(const PressureInfo& info) {
    (void)info;
    return false;
  }
  // The request has failed and is about to return this verdict. Must not throw.
  virtual void on_out_of_memory(const OomVerdict& verdict) { (void)verdict; }
};

}  // namespace gpumemx
