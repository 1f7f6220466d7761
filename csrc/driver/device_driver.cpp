// SPDX-License-Identifier: BSD-3-Clause
//
// Names of the driver calls, as figures and hazards print them: those of the methods.
#include "driver/device_driver.hpp"

namespace gpumemx {

const char* to_string(DriverCall call) {
  switch (call) {
    case DriverCall::kReserve: return "reserve";
    case DriverCall::kUnreserve: return "unreserve";
    case DriverCall::kCreate: return "create";
    case DriverCall::kRelease: return "release";
    case DriverCall::kMap: return "map";
    case DriverCall::kSetAccess: return "set_access";
    case DriverCall::kUnmap: return "unmap";
    case DriverCall::kExport: return "export_handle";
    case DriverCall::kImport: return "import_handle";
    case DriverCall::kAllocate: return "allocate";
    case DriverCall::kFree: return "free";
    case DriverCall::kRecord: return "record";
    case DriverCall::kQuery: return "query";
    case DriverCall::kWait: return "wait";
    case DriverCall::kMemory: return "memory";
    case DriverCall::kSynchronize: return "synchronize";
    case DriverCall::kCopy: return "copy";
    case DriverCall::kHold: return "hold";
  }
  return "unknown";
}

}  // namespace gpumemx
