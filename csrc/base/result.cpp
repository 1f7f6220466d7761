// SPDX-License-Identifier: BSD-3-Clause
#include "base/result.hpp"

namespace gpumemx {

const char* to_string(Errc code) {
  switch (code) {
    case Errc::kOutOfMemory: return "out of memory";
    case Errc::kOutOfAddressSpace: return "out of address space";
    case Errc::kUnsupported: return "unsupported";
    case Errc::kCaptureActive: return "the stream is capturing";
    case Errc::kShuttingDown: return "the driver is shutting down";
    case Errc::kInvalidArgument: return "invalid argument";
    case Errc::kDriverFailure: return "driver failure";
  }
  return "unknown";
}

}  // namespace gpumemx
