// SPDX-License-Identifier: BSD-3-Clause
//
// Names: of streams, and of the driver calls, as figures and hazards print them: those of the methods.
#include "driver/device_driver.hpp"

namespace gpumemx {

namespace {

constexpr std::uint64_t kPermanent = 1ull << 63, kInCapture = 1ull << 62;

// A one-to-one mixing of 64 bits: the finalizer of splitmix64.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

StreamId id_of_permanent(std::uint64_t native) { return StreamId{native | kPermanent}; }

StreamId id_in_capture(std::uint64_t native, std::uint64_t capture) {
  return StreamId{(mixed(native ^ mixed(capture)) & (kInCapture - 1)) | kInCapture};
}

// Undone by doing it again. Handles and CUDA's own ids have no bit there.
StreamRef of_other_device(StreamRef theirs, int device) {
  const auto id = static_cast<std::uint64_t>(theirs.id);
  return {StreamId{id ^ (static_cast<std::uint64_t>(device + 1) << 48)}, theirs.native, device};
}

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
