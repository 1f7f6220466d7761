// SPDX-License-Identifier: BSD-3-Clause
//
// The only calls to cu* of the library.
#include "driver/cuda/cuda_driver.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "driver/cuda/entry_points.hpp"

namespace gpumemx {

namespace {

constexpr std::chrono::microseconds kFirstPause{10}, kLongestPause{200};  // of wait_any()
constexpr std::chrono::milliseconds kLongestRest{250};                    // that hold() waits

CUstream as_stream(StreamRef stream) { return reinterpret_cast<CUstream>(stream.native); }
CUevent as_event(EventId event) {
  return reinterpret_cast<CUevent>(static_cast<std::uintptr_t>(event));
}

// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT while the stream captures; the driver says that of the legacy stream
// while a stream captures that it would wait for.
CUresult capture_state(const EntryPoints& cu, StreamRef stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult r = cu.stream_is_capturing(as_stream(stream), &status);
  if (r != CUDA_SUCCESS || status == CU_STREAM_CAPTURE_STATUS_NONE) return r;
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

Error capturing() {
  return {Errc::kCaptureActive, {}, "CudaDriver::record: the stream is capturing"};
}

Errc code_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY: return Errc::kOutOfMemory;
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: return Errc::kShuttingDown;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NO_DEVICE: return Errc::kUnsupported;
    case CUDA_ERROR_CAPTURED_EVENT: return Errc::kCaptureActive;  // see record()
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_DEVICE:
    // Calls that a capture forbids: the caller's bug, see RelaxedCapture.
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: return Errc::kInvalidArgument;
    default: return Errc::kDriverFailure;
  }
}

std::string text_of(const EntryPoints& cu, const char* call, CUresult result) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  (void)cu.get_error_name(result, &name);
  (void)cu.get_error_string(result, &meaning);
  std::string text = std::string(call) + ": ";
  text += name != nullptr ? name : "error " + std::to_string(static_cast<int>(result));
  if (meaning != nullptr) text += std::string(" (") + meaning + ")";
  return text;
}

CUmemAllocationProp properties(int device, bool exportable, bool rdma_capable) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  if (exportable) prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.allocFlags.gpuDirectRDMACapable = rdma_capable ? 1 : 0;
  return prop;
}

CUmemAccessDesc read_and_write(int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

}  // namespace

// The device's context, or `context`, is current on this thread while it lives. A thread of the program nearly
// always has it current already; then this is one read of a thread-local by the driver.
class CudaDriver::ContextScope {
 public:
  explicit ContextScope(CudaDriver& driver) : ContextScope(driver, driver.context_) {}
  ContextScope(CudaDriver& driver, CUcontext context) : cu_(driver.cu_) {
    if (driver.is_gone_.load(std::memory_order_relaxed)) {
      result_ = CUDA_ERROR_DEINITIALIZED;
      return;
    }
    CUcontext current = nullptr;
    result_ = cu_.context_get(&current);
    if (result_ != CUDA_SUCCESS || current == context) return;
    result_ = cu_.context_push(context);
    is_pushed_ = result_ == CUDA_SUCCESS;
  }
  ~ContextScope() {
    if (!is_pushed_) return;
    CUcontext ours = nullptr;
    (void)cu_.context_pop(&ours);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  bool ok() const { return result_ == CUDA_SUCCESS; }
  CUresult result() const { return result_; }

 private:
  const EntryPoints& cu_;
  CUresult result_ = CUDA_SUCCESS;
  bool is_pushed_ = false;
};

Result<std::unique_ptr<CudaDriver>> CudaDriver::open(int device) {
  const Result<EntryPoints>& loaded = cuda_entry_points();
  if (!loaded.ok()) return loaded.error();
  const EntryPoints& cu = loaded.value();
  const auto failed = [&](const char* call, CUresult result) {
    return Error{code_of(result), {}, text_of(cu, call, result)};
  };
  if (const CUresult r = cu.init(0); r != CUDA_SUCCESS) return failed("cuInit", r);
  CUdevice cu_device = 0;
  if (const CUresult r = cu.device_get(&cu_device, device); r != CUDA_SUCCESS) {
    return failed("cuDeviceGet", r);
  }
  CUcontext context = nullptr;
  if (const CUresult r = cu.primary_retain(&context, cu_device); r != CUDA_SUCCESS) {
    return failed("cuDevicePrimaryCtxRetain", r);
  }
  std::unique_ptr<CudaDriver> driver(new CudaDriver(cu, cu_device, context));
  driver->probe();
  return driver;
}

CudaDriver::CudaDriver(const EntryPoints& cu, int device, CUctx_st* context)
    : cu_(cu), device_(device), context_(context) {}

CudaDriver::~CudaDriver() {
  {
    const ContextScope scope(*this);
    MutexLock lock(events_mu_);
    if (scope.ok()) {
      for (CUevent event : idle_events_) (void)cu_.event_destroy(event);
      for (CUevent event : other_events_) (void)cu_.event_destroy(event);
    }
  }
  if (is_gone_.load()) return;
  const MutexLock lock(mu_);
  for (const auto& [device, context] : other_contexts_) (void)cu_.primary_release(device);
  (void)cu_.primary_release(device_);
}

int CudaDriver::attribute(int which) const {
  int value = 0;
  const auto name = static_cast<CUdevice_attribute>(which);
  return cu_.device_get_attribute(&value, name, device_) == CUDA_SUCCESS ? value : 0;
}

void CudaDriver::probe() {
  const bool has_virtual_memory =
      attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0;
  const bool has_descriptors =
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  const bool has_rdma = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  traits_.virtual_memory = has_virtual_memory;
  if (!has_virtual_memory) return;
  // Virtual devices and containers claim what they then refuse: take the most that works.
  for (const auto& [exportable, rdma] : {std::pair{true, true}, {true, false}, {false, false}}) {
    if ((exportable && !has_descriptors) || (rdma && !has_rdma)) continue;
    traits_.exportable = exportable;
    is_rdma_capable_ = rdma;
    if (probe_virtual_memory()) return;
  }
  traits_.virtual_memory = false;
  traits_.exportable = false;
  is_rdma_capable_ = false;
}

bool CudaDriver::probe_virtual_memory() {
  const CUmemAllocationProp prop = properties(device_, traits_.exportable, is_rdma_capable_);
  std::size_t granularity = 0;
  if (cu_.mem_granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS ||
      !std::has_single_bit(granularity)) {
    return false;
  }
  traits_.granularity = {granularity};
  const Result<AddrRange> range = reserve(traits_.granularity, traits_.granularity);
  if (!range.ok()) return false;
  bool works = false;
  if (const Result<HandleId> handle = create(traits_.granularity); handle.ok()) {
    if (map(range.value(), handle.value()).ok()) {
      works = set_access(range.value()).ok();
      works = unmap(range.value()).ok() && works;
    }
    works = release(handle.value()).ok() && works;
  }
  return unreserve(range.value()).ok() && works;
}

Error CudaDriver::fail(const char* call, int result, Bytes size) {
  const auto cu_result = static_cast<CUresult>(result);
  const Errc code = code_of(cu_result);
  if (code == Errc::kShuttingDown) {
    // Not even the name of the error is asked for: the driver may be half unloaded.
    is_gone_.store(true, std::memory_order_relaxed);
    return {code, size, std::string(call) + ": the CUDA driver is shutting down"};
  }
  return {code, size, text_of(cu_, call, cu_result)};
}

Error CudaDriver::misuse(const char* call, const char* rule, Bytes size) {
  return {Errc::kInvalidArgument, size, std::string("CudaDriver::") + call + ": " + rule};
}

Result<AddrRange> CudaDriver::reserve(Bytes size, Bytes alignment) {
  if (!traits_.virtual_memory) return Error{Errc::kUnsupported, size, "no virtual memory"};
  if (size.n == 0 || size.n % traits_.granularity.n != 0 || !std::has_single_bit(alignment.n) ||
      alignment < traits_.granularity) {
    return misuse("reserve", "size or alignment is not allowed", size);
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), size);
  CUdeviceptr begin = 0;
  const CUresult r = cu_.mem_reserve(&begin, size.n, alignment.n, 0, 0);
  // Here "out of memory" is about addresses.
  if (r == CUDA_ERROR_OUT_OF_MEMORY) {
    return Error{Errc::kOutOfAddressSpace, size, text_of(cu_, "cuMemAddressReserve", r)};
  }
  if (r != CUDA_SUCCESS) return fail("cuMemAddressReserve", r, size);
  MutexLock lock(mu_);
  reserved_[DeviceAddr{begin}] = size;
  return AddrRange{DeviceAddr{begin}, size};
}

Status CudaDriver::unreserve(AddrRange range) {
  {
    MutexLock lock(mu_);
    const auto it = reserved_.find(range.begin);
    if (it == reserved_.end() || it->second != range.size) {
      return misuse("unreserve", "not a whole reserved range", range.size);
    }
    if (is_mapped_in(range)) return misuse("unreserve", "still mapped", range.size);
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), range.size);
  const CUresult r = cu_.mem_unreserve(range.begin.n, range.size.n);
  if (r != CUDA_SUCCESS) return fail("cuMemAddressFree", r, range.size);
  MutexLock lock(mu_);
  reserved_.erase(range.begin);
  return ok_status();
}

Result<HandleId> CudaDriver::add_handle(std::uint64_t native, Bytes size) {
  MutexLock lock(mu_);
  // Ids of our own: the driver hands out the value of a released handle again.
  const HandleId id{next_handle_++};
  handles_[id] = {native, size, 0, -1};
  return id;
}

Result<HandleId> CudaDriver::create(Bytes size) {
  if (!traits_.virtual_memory) return Error{Errc::kUnsupported, size, "no virtual memory"};
  if (size.n == 0 || size.n % traits_.granularity.n != 0) {
    return misuse("create", "the size is not a positive multiple of the granularity", size);
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), size);
  const CUmemAllocationProp prop = properties(device_, traits_.exportable, is_rdma_capable_);
  CUmemGenericAllocationHandle native = 0;
  const CUresult r = cu_.mem_create(&native, size.n, &prop, 0);
  if (r != CUDA_SUCCESS) return fail("cuMemCreate", r, size);
  return add_handle(native, size);
}

Status CudaDriver::release(HandleId handle) {
  Handle found;
  {
    MutexLock lock(mu_);
    const auto it = handles_.find(handle);
    if (it == handles_.end()) return misuse("release", "no such handle");
    if (it->second.mappings != 0) return misuse("release", "still mapped", it->second.size);
    found = it->second;
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), found.size);
  const CUresult r = cu_.mem_release(found.native);
  if (r != CUDA_SUCCESS) return fail("cuMemRelease", r, found.size);
  // A descriptor holds the memory too: before it is closed the device has nothing back.
  if (found.fd >= 0) (void)::close(found.fd);
  MutexLock lock(mu_);
  handles_.erase(handle);
  return ok_status();
}

Status CudaDriver::map(AddrRange range, HandleId handle) {
  std::uint64_t native = 0;
  {
    MutexLock lock(mu_);
    const auto it = handles_.find(handle);
    if (it == handles_.end()) return misuse("map", "no such handle", range.size);
    if (it->second.size.n != 0 && it->second.size != range.size) {
      return misuse("map", "the handle has another size", range.size);
    }
    if (!is_reserved(range)) return misuse("map", "not in one reserved range", range.size);
    if (is_mapped_in(range)) return misuse("map", "already mapped", range.size);
    native = it->second.native;
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), range.size);
  const CUresult r = cu_.mem_map(range.begin.n, range.size.n, 0, native, 0);
  if (r != CUDA_SUCCESS) return fail("cuMemMap", r, range.size);
  MutexLock lock(mu_);
  ++handles_[handle].mappings;
  mappings_[range.begin] = {range.size, handle};
  return ok_status();
}

Status CudaDriver::set_access(AddrRange range, const std::vector<int>& peers) {
  {
    MutexLock lock(mu_);
    if (!is_union_of_mappings(range)) {
      return misuse("set_access", "not the union of whole mappings", range.size);
    }
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), range.size);
  std::vector<CUmemAccessDesc> access{read_and_write(device_)};
  for (const int peer : peers) access.push_back(read_and_write(peer));
  const CUresult r = cu_.mem_set_access(range.begin.n, range.size.n, access.data(), access.size());
  if (r != CUDA_SUCCESS) return fail("cuMemSetAccess", r, range.size);
  return ok_status();
}

Status CudaDriver::unmap(AddrRange range) {
  {
    MutexLock lock(mu_);
    const auto it = mappings_.find(range.begin);
    if (it == mappings_.end() || it->second.size != range.size) {
      return misuse("unmap", "not the range of one map()", range.size);
    }
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), range.size);
  const CUresult r = cu_.mem_unmap(range.begin.n, range.size.n);
  if (r != CUDA_SUCCESS) return fail("cuMemUnmap", r, range.size);
  MutexLock lock(mu_);
  const auto it = mappings_.find(range.begin);
  --handles_[it->second.handle].mappings;
  mappings_.erase(it);
  return ok_status();
}

Result<int> CudaDriver::export_handle(HandleId handle) {
  if (!traits_.exportable) return Error{Errc::kUnsupported, {}, "handles stay in the process"};
  Handle found;
  {
    MutexLock lock(mu_);
    const auto it = handles_.find(handle);
    if (it == handles_.end()) return misuse("export_handle", "no such handle");
    found = it->second;
  }
  if (found.fd >= 0) return found.fd;
  if (found.size.n == 0) return misuse("export_handle", "an imported handle");
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  int fd = -1;
  const CUresult r = cu_.mem_export(&fd, found.native, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (r != CUDA_SUCCESS) return fail("cuMemExportToShareableHandle", r, found.size);
  // A program that this process starts would keep the memory alive with it.
  (void)::fcntl(fd, F_SETFD, FD_CLOEXEC);
  MutexLock lock(mu_);
  handles_[handle].fd = fd;
  return fd;
}

Result<HandleId> CudaDriver::import_handle(int fd) {
  if (!traits_.exportable) return Error{Errc::kUnsupported, {}, "handles stay in the process"};
  if (fd < 0) return misuse("import_handle", "no descriptor");
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  CUmemGenericAllocationHandle native = 0;
  void* os_handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd));
  const CUresult r = cu_.mem_import(&native, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (r != CUDA_SUCCESS) return fail("cuMemImportFromShareableHandle", r);
  return add_handle(native, {});
}

Result<HandleId> CudaDriver::import_fabric(const FabricHandle& exported) {
  if (!traits_.virtual_memory) return Error{Errc::kUnsupported, {}, "no virtual memory"};
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  // CU_MEM_HANDLE_TYPE_FABRIC by value: <cuda.h> names it from CUDA 12.3 on.
  constexpr auto kFabric = static_cast<CUmemAllocationHandleType>(0x8);
  FabricHandle bytes = exported;  // the driver asks for memory that it could write to
  CUmemGenericAllocationHandle native = 0;
  const CUresult r = cu_.mem_import(&native, bytes.data(), kFabric);
  if (r != CUDA_SUCCESS) return fail("cuMemImportFromShareableHandle", r);
  return add_handle(native, {});
}

Result<DeviceAddr> CudaDriver::allocate(Bytes size) {
  if (size.n == 0) return misuse("allocate", "the size is zero");
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), size);
  CUdeviceptr address = 0;
  const CUresult r = cu_.mem_alloc(&address, size.n);
  if (r != CUDA_SUCCESS) return fail("cuMemAlloc", r, size);
  return DeviceAddr{address};
}

Status CudaDriver::free(DeviceAddr address) {
  if (address.n == 0) return misuse("free", "no address");  // the driver would say success
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  const CUresult r = cu_.mem_free(address.n);
  if (r != CUDA_SUCCESS) return fail("cuMemFree", r);
  return ok_status();
}

// Who has a stream has its context: nothing is started by retaining it.
Result<CUctx_st*> CudaDriver::context_of(StreamRef stream) {
  if (stream.device < 0 || stream.device == device_) return context_;
  const MutexLock lock(mu_);
  CUcontext& context = other_contexts_[stream.device];
  if (context != nullptr) return context;
  if (const CUresult r = cu_.primary_retain(&context, stream.device); r != CUDA_SUCCESS) {
    other_contexts_.erase(stream.device);
    return fail("cuDevicePrimaryCtxRetain", r);
  }
  return context;
}

Result<EventId> CudaDriver::record(StreamRef stream) {
  const Result<CUcontext> context = context_of(stream);
  if (!context.ok()) return context.error();
  const ContextScope scope(*this, context.value());
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  const bool is_ours = context.value() == context_;
  // Asked first: recorded in a capture, an event belongs to somebody's graph.
  CUresult r = capture_state(cu_, stream);
  if (r == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return capturing();
  if (r != CUDA_SUCCESS) return fail("cuStreamIsCapturing", r);
  if (as_stream(stream) == CU_STREAM_PER_THREAD) {
    // In each thread the name of another stream: elsewhere the event would be on the wrong one.
    const Result<StreamId> id = id_here(stream.native);
    if (!id.ok()) return id.error();
    const StreamRef here{id.value(), stream.native};
    if (stream != (is_ours ? here : of_other_device(here, stream.device))) {
      return misuse("record", "the default stream of another thread");
    }
  }

  CUevent event = nullptr;
  if (is_ours) {
    MutexLock lock(events_mu_);
    if (!idle_events_.empty()) {
      event = idle_events_.back();
      idle_events_.pop_back();
    }
  }
  if (event == nullptr) {
    r = cu_.event_create(&event, CU_EVENT_DISABLE_TIMING);
    if (r != CUDA_SUCCESS) return fail("cuEventCreate", r);
  }
  if (!is_ours) {
    MutexLock lock(events_mu_);
    other_events_.insert(event);
  }
  const EventId id{reinterpret_cast<std::uintptr_t>(event)};
  r = cu_.event_record(event, as_stream(stream));
  if (r != CUDA_SUCCESS) {
    recycle(id);
    return fail("cuEventRecord", r);
  }
  // And asked again: the stream may be another thread's, which has begun a capture since. That has the
  // event then, and would become invalid if anybody asked for it.
  if (capture_state(cu_, stream) != CUDA_SUCCESS) {
    {
      MutexLock lock(events_mu_);
      other_events_.erase(event);
    }
    (void)cu_.event_destroy(event);
    return capturing();
  }
  return id;
}

Result<bool> CudaDriver::query(EventId event) {
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  const CUresult r = cu_.event_query(as_event(event));
  if (r == CUDA_SUCCESS) return true;
  if (r == CUDA_ERROR_NOT_READY) return false;
  return fail("cuEventQuery", r);
}

Status CudaDriver::wait(EventId event) {
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  const CUresult r = cu_.event_synchronize(as_event(event));
  if (r != CUDA_SUCCESS) return fail("cuEventSynchronize", r);
  return ok_status();
}

Result<std::size_t> CudaDriver::wait_any(const std::vector<EventId>& events) {
  if (events.empty()) return misuse("wait_any", "no event");
  if (events.size() == 1) {
    const Status done = wait(events.front());
    if (!done.ok()) return done.error();
    return std::size_t{0};
  }
  // The driver can block on one event only. 1.6 us a question, so a pause between rounds.
  auto pause = kFirstPause;
  for (;;) {
    for (std::size_t i = 0; i < events.size(); ++i) {
      const Result<bool> reached = query(events[i]);
      if (!reached.ok()) return reached.error();
      if (reached.value()) return i;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void CudaDriver::recycle(EventId event) {
  if (event == EventId{}) return;
  {
    MutexLock lock(events_mu_);
    if (other_events_.erase(as_event(event)) == 0) {
      idle_events_.push_back(as_event(event));
      return;
    }
  }
  (void)cu_.event_destroy(as_event(event));
}

CaptureMode CudaDriver::exchange_capture_mode(CaptureMode mode) {
  // The mode is the thread's and needs no context.
  if (is_gone_.load(std::memory_order_relaxed)) return CaptureMode::kGlobal;
  CUstreamCaptureMode cu_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  if (mode == CaptureMode::kThreadLocal) cu_mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  if (mode == CaptureMode::kRelaxed) cu_mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  if (cu_.exchange_capture_mode(&cu_mode) != CUDA_SUCCESS) return CaptureMode::kGlobal;
  if (cu_mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) return CaptureMode::kThreadLocal;
  return cu_mode == CU_STREAM_CAPTURE_MODE_RELAXED ? CaptureMode::kRelaxed : CaptureMode::kGlobal;
}

Result<DeviceMemory> CudaDriver::memory() {
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  const CUresult r = cu_.mem_get_info(&free_bytes, &total_bytes);
  if (r != CUDA_SUCCESS) return fail("cuMemGetInfo", r);
  return DeviceMemory{{free_bytes}, {total_bytes}};
}

Status CudaDriver::synchronize() {
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  const CUresult r = cu_.context_synchronize();
  if (r != CUDA_SUCCESS) return fail("cuCtxSynchronize", r);
  return ok_status();
}

Status CudaDriver::copy(DeviceAddr to, DeviceAddr from, Bytes size) {
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result(), size);
  // A stream of its own: on the program's default stream it would wait for all others, and a thread's
  // default stream may be capturing.
  CUstream stream = nullptr;
  CUresult r = cu_.stream_create(&stream, CU_STREAM_NON_BLOCKING);
  if (r != CUDA_SUCCESS) return fail("cuStreamCreate", r, size);
  const char* call = "cuMemcpyDtoDAsync";
  r = cu_.copy_on_device(to.n, from.n, size.n, stream);
  if (r == CUDA_SUCCESS) {
    call = "cuStreamSynchronize";
    r = cu_.stream_synchronize(stream);
  }
  (void)cu_.stream_destroy(stream);
  if (r != CUDA_SUCCESS) return fail(call, r, size);
  return ok_status();
}

class CudaDriver::Gate {
 public:
  void open() {
    {
      const std::lock_guard lock(mu_);
      is_open_ = true;
    }
    opened_.notify_all();
  }

  // Runs on a thread of the driver, which may make no call to it. `data`: a shared pointer of its own.
  static void CUDA_CB pass(void* data) {
    const std::unique_ptr<std::shared_ptr<Gate>> owned(static_cast<std::shared_ptr<Gate>*>(data));
    Gate& gate = **owned;
    std::unique_lock lock(gate.mu_);
    gate.opened_.wait(lock, [&] { return gate.is_open_; });
  }

 private:
  std::mutex mu_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

Result<HoldId> CudaDriver::hold(const std::vector<StreamRef>& streams) {
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  const auto gate = std::make_shared<Gate>();
  std::vector<EventId> before;
  std::optional<Error> error;
  for (const StreamRef stream : streams) {
    const auto event = record(stream);  // refuses streams that capture
    if (!event.ok()) {
      error = event.error();
      break;
    }
    before.push_back(event.value());
    auto own = std::make_unique<std::shared_ptr<Gate>>(gate);
    const Result<CUcontext> context = context_of(stream);
    const ContextScope there(*this, context.ok() ? context.value() : context_);
    const CUresult r = cu_.launch_host(as_stream(stream), &Gate::pass, own.get());
    if (r != CUDA_SUCCESS) {
      error = fail("cuLaunchHostFunc", r);
      break;
    }
    (void)own.release();  // pass() deletes it
  }
  const auto until = std::chrono::steady_clock::now() + kLongestRest;
  bool is_late = false;
  for (const EventId event : before) {
    while (!error && !is_late) {
      const auto reached = query(event);
      if (!reached.ok()) {
        error = reached.error();
      } else if (reached.value()) {
        break;
      } else if (std::chrono::steady_clock::now() > until) {
        is_late = true;
      } else {
        std::this_thread::sleep_for(kFirstPause);
      }
    }
    recycle(event);
  }
  if (error || is_late) {
    gate->open();
    if (error) return *error;
    return HoldId{};
  }
  MutexLock lock(mu_);
  const HoldId id{next_hold_++};
  gates_.emplace(id, gate);
  return id;
}

void CudaDriver::let_go(HoldId hold) {
  std::shared_ptr<Gate> gate;
  {
    MutexLock lock(mu_);
    const auto found = gates_.find(hold);
    if (found == gates_.end()) return;
    gate = std::move(found->second);
    gates_.erase(found);
  }
  gate->open();
}

Result<StreamId> CudaDriver::stream_id(std::uint64_t native) {
  if (cu_.stream_get_id == nullptr) {
    return Error{Errc::kUnsupported, {}, "cuStreamGetId: needs a CUDA 12.0 driver"};
  }
  const ContextScope scope(*this);
  if (!scope.ok()) return fail("cuCtxPushCurrent", scope.result());
  return id_here(native);
}

Result<StreamId> CudaDriver::id_here(std::uint64_t native) {
  const auto stream = reinterpret_cast<CUstream>(native);
  // Asked first: of a stream that captures cuStreamGetId() tells nothing (error 900).
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t capture = 0;
  CUresult r = cu_.stream_capture_info(stream, &status, &capture);
  if (r == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE) {
    return id_in_capture(native, status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? capture : 0);
  }
  unsigned long long id = 0;
  r = cu_.stream_get_id(stream, &id);
  if (r != CUDA_SUCCESS) return fail("cuStreamGetId", r);
  return StreamId{id};
}

std::uint64_t CudaDriver::native_handle(HandleId handle) const {
  MutexLock lock(mu_);
  const auto it = handles_.find(handle);
  return it == handles_.end() ? 0 : it->second.native;
}

bool CudaDriver::is_union_of_mappings(AddrRange range) const {
  DeviceAddr end = range.begin;
  for (auto it = mappings_.find(range.begin);
       end < range.end() && it != mappings_.end() && it->first == end; ++it) {
    end = end + it->second.size;
  }
  return range.size.n != 0 && end == range.end();
}

bool CudaDriver::is_mapped_in(AddrRange range) const {
  auto it = mappings_.lower_bound(range.end());
  if (it == mappings_.begin()) return false;
  --it;
  return range.overlaps({it->first, it->second.size});
}

bool CudaDriver::is_reserved(AddrRange range) const {
  auto it = reserved_.upper_bound(range.begin);
  if (it == reserved_.begin()) return false;
  --it;
  return range.end() <= it->first + it->second;
}

}  // namespace gpumemx
