// SPDX-License-Identifier: BSD-3-Clause
//
// Everything gpumemx asks of a device, and nothing else. Implementations: CudaDriver (libcuda),
// SimDriver (deterministic, in-process) and decorators that wrap either. tests/contract/ runs one
// suite over all of them; a rule that is not tested there is not a rule.
//
// Virtual-memory mode. Life of a range of addresses, and of the handle that stands behind it:
//
//   range:   reserve() -> RESERVED -> map() -> MAPPED -> set_access() -> USABLE
//                            ^                    |                         |
//            unreserve() <---+<----- unmap() -----+<------------------------+
//
//   handle:  create() -> LOOSE -> map() -> MAPPED at n >= 1 ranges -> last unmap() -> LOOSE
//                          |                                                           |
//                          +---------------------> release() <-------------------------+
//
// map() joins one whole handle to a range of the handle's size; a part of either cannot be mapped
// and a mapping is unmapped whole. One handle may stand behind several ranges at once: they are
// aliases, coherent between kernels in stream order. The device may touch a range only while it is
// USABLE. No call here waits for work that is running, except wait(), wait_any(), free(),
// synchronize(), copy() and hold().
//
// Other processes reach a handle through a descriptor, or a fabric handle where the machine has them:
// export_handle() on one side, import_handle() or import_fabric() on the other. Other devices of this
// process reach it through set_access() with a list of them.
//
// Plain mode: allocate() -> USABLE -> free(), as cudaMalloc and cudaFree; free() waits for the
// device. For devices without virtual memory, and for pools whose users need one driver allocation.
//
// Captures: reserve, create, map, set_access, unmap and release are allowed while any stream
// captures, from any thread. query, wait, wait_any, allocate, free, synchronize, copy and hold called from
// *any* thread end a capture in global mode as invalid, unless the calling thread's capture mode is
// relaxed: see RelaxedCapture.
//
// Calls out of these orders are the caller's bug: CudaDriver reports kInvalidArgument, SimDriver
// also notes a hazard. A call that fails has no effect. Every call may fail with kShuttingDown or
// kDriverFailure besides what is listed.
//
// Threads: every method may be called from any thread at any time. The caller, not the driver, keeps
// two threads from changing one range or one handle at once.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace gpumemx {

// Names of streams that CUDA's own ids, small numbers, never are. A stream that lives as long as the
// process needs no other name than its handle. One that captures has a name for as long as it does:
// CUDA tells the id of the capture (`capture`) but not that of the stream.
StreamId id_of_permanent(std::uint64_t native);
StreamId id_in_capture(std::uint64_t native, std::uint64_t capture);
// A stream of another device, as all devices but its own name it: `theirs` is its own device's name,
// and names of two devices can be the same (the default streams' are).
StreamRef of_other_device(StreamRef theirs, int device);

// Fixed for a driver's lifetime; read once by each allocator.
struct DeviceTraits {
  Bytes granularity{2u << 20};  // sizes and addresses given to create() and map() are multiples
  bool virtual_memory = true;  // proven by a real create + map + set_access; false: plain mode only
  bool exportable = false;     // handles can be exported as POSIX file descriptors
};

struct DeviceMemory {
  Bytes free;  // as the device reports it: other processes change it between two calls
  Bytes total;
};

// The calls that are counted, timed and (in the simulation) made to fail, one name each.
enum class DriverCall {
  kReserve,
  kUnreserve,
  kCreate,
  kRelease,
  kMap,
  kSetAccess,
  kUnmap,
  kExport,
  kImport,
  kAllocate,
  kFree,
  kRecord,
  kQuery,
  kWait,
  kMemory,
  kSynchronize,
  kCopy,
  kHold,
};
inline constexpr int kDriverCallKinds = 18;
const char* to_string(DriverCall call);

// What another process sends instead of a descriptor where memory is exported over a fabric: the
// driver's own bytes.
using FabricHandle = std::array<std::byte, 64>;

enum class HoldId : std::uint64_t {};  // streams that are held; 0 is none

enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

class DeviceDriver {
 public:
  virtual ~DeviceDriver() = default;
  virtual const DeviceTraits& traits() const noexcept = 0;

  // Addresses only; costs no device memory. The range is aligned to `alignment`.
  // REQUIRES: size is a positive multiple of granularity; alignment is a power of two >= granularity.
  // Fails: kOutOfAddressSpace, kUnsupported.
  virtual Result<AddrRange> reserve(Bytes size, Bytes alignment) = 0;
  virtual Status unreserve(AddrRange range) = 0;  // REQUIRES: a whole reserve() result, unmapped

  // Device memory. REQUIRES: size is a positive multiple of granularity. Fails: kOutOfMemory.
  virtual Result<HandleId> create(Bytes size) = 0;
  virtual Status release(HandleId handle) = 0;  // REQUIRES: not mapped anywhere

  // REQUIRES: range lies in one reserved range, unmapped, and range.size is the handle's size.
  virtual Status map(AddrRange range, HandleId handle) = 0;
  // Lets this device and `peers`, other devices by ordinal, read and write; who could before still can.
  // REQUIRES: range is the union of whole mappings; each peer can reach this device.
  // Fails: kOutOfMemory when the driver holds all the mappings it can.
  virtual Status set_access(AddrRange range, const std::vector<int>& peers) = 0;
  Status set_access(AddrRange range) { return set_access(range, {}); }
  // REQUIRES: range is that of one map() call, and no work that touches it is queued or running, but on
  // streams that are held until something is USABLE there again.
  virtual Status unmap(AddrRange range) = 0;

  // A file descriptor that another process can import. It is the driver's: made at the first call
  // (1.1 ms), the same at every later one, closed by release(). REQUIRES: not an imported handle.
  // Fails: kUnsupported; kDriverFailure also when the process may open no more files.
  virtual Result<int> export_handle(HandleId handle) = 0;
  // A handle of this process for memory exported by another (or the same); release() it too. The
  // descriptor stays the caller's, and may be closed. Whoever maps it says its size.
  virtual Result<HandleId> import_handle(int fd) = 0;
  // The same for a fabric handle. Fails: kUnsupported on machines without.
  virtual Result<HandleId> import_fabric(const FabricHandle& exported) = 0;

  // Plain mode. REQUIRES: size > 0. Fails: kOutOfMemory.
  virtual Result<DeviceAddr> allocate(Bytes size) = 0;
  virtual Status free(DeviceAddr address) = 0;  // blocks until the device is idle

  // The id of the stream that has this native handle now (0.1 us); while the stream captures, one that
  // is good for that capture only (id_in_capture()). REQUIRES: there is one.
  // Fails: kUnsupported before CUDA 12.
  virtual Result<StreamId> stream_id(std::uint64_t native) = 0;

  // Marks the end of the work now queued on `stream`, which may be another device's
  // (StreamRef::device). Never blocks. REQUIRES: the stream exists.
  // Fails: kCaptureActive while the stream captures, or when another thread has it begin to meanwhile;
  // kInvalidArgument for the per-thread default stream of a thread other than the calling one. Then
  // there is no event.
  virtual Result<EventId> record(StreamRef stream) = 0;
  // True when all work before the event is done; true for ever after. Fails: kCaptureActive when a
  // capture that began and ended while the event was being recorded has it; such an event says nothing.
  virtual Result<bool> query(EventId event) = 0;
  virtual Status wait(EventId event) = 0;  // blocks the calling thread until query() would be true
  // The same until it would be true for one of them, whichever that is; the earlier ones in the list
  // are looked at first. Returns its index. REQUIRES: not empty.
  virtual Result<std::size_t> wait_any(const std::vector<EventId>& events) = 0;
  virtual void recycle(EventId event) = 0;  // ends the event's life; never fails, never blocks

  // The calling thread's capture mode, which it replaces. Prefer RelaxedCapture.
  virtual CaptureMode exchange_capture_mode(CaptureMode mode) = 0;

  virtual Result<DeviceMemory> memory() = 0;

  // Blocks until all work queued on the device is done, on streams that nobody told of too.
  virtual Status synchronize() = 0;
  // Copies memory of this device; blocks until it is there. REQUIRES: both ranges are USABLE and do not
  // overlap, and no work that touches them is queued or running.
  virtual Status copy(DeviceAddr to, DeviceAddr from, Bytes size) = 0;

  // What is queued on the streams from now on, by whomever, does not start before let_go(). Blocks until
  // what was queued before is done, for a quarter of a second at most: then nothing is held, and the
  // result is HoldId{}. Until let_go() call nothing that waits for the device, free() above all; other
  // callbacks of the program on the host wait too, so let go within moments.
  // REQUIRES: the streams exist. Fails: kCaptureActive when one captures; then nothing is held.
  virtual Result<HoldId> hold(const std::vector<StreamRef>& streams) = 0;
  virtual void let_go(HoldId hold) = 0;  // never fails, never blocks
};

// While it lives, calls of this thread that captures in global mode forbid are allowed. Every driver
// call of the allocator happens inside one: any other thread may be capturing.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(DeviceDriver& driver)
      : driver_(driver), before_(driver.exchange_capture_mode(CaptureMode::kRelaxed)) {}
  ~RelaxedCapture() { (void)driver_.exchange_capture_mode(before_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  DeviceDriver& driver_;
  CaptureMode before_;
};

}  // namespace gpumemx
