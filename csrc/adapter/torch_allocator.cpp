// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/torch_allocator.hpp"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "adapter/convert.hpp"
#include "base/version.hpp"

namespace gpumemx::adapter {

namespace {

// The deleter is a plain function, compared by address in several places of torch, so it finds its
// allocator here. Set once, by the one allocator that a process makes, and never reset.
std::atomic<TorchAllocator*> the_allocator{nullptr};

void delete_block(void* ptr) { the_allocator.load(std::memory_order_relaxed)->raw_delete(ptr); }

// With caching off (PYTORCH_NO_CUDA_MEMORY_CACHING, enable(false)): as torch's own, straight through.
void delete_uncached(void* ptr) {
  if (const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
      C10_UNLIKELY(interp)) {
    (*interp)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
  }
  C10_CUDA_CHECK(cudaFree(ptr));
}

[[noreturn]] void not_yet(const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "gpumemx ", build::kVersion, " does not support ", what,
                              " yet. Run without gpumemx.install_allocator() (or with "
                              "GPUMEMX_DISABLE=1) where you need it.");
  std::abort();  // not reached; the macro throws
}

bool environment_is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' && std::string(value) != "0";
}

DeviceAddr address_of(const void* ptr) { return {reinterpret_cast<std::uintptr_t>(ptr)}; }
void* pointer_to(DeviceAddr a) { return reinterpret_cast<void*>(a.n); }  // NOLINT: device memory

}  // namespace

TorchAllocator::TorchAllocator(DeviceRegistry& devices, torch_alloc::CUDAAllocator* previous)
    : devices_(devices),
      previous_(previous),
      caching_off_by_environment_(environment_is_set("PYTORCH_NO_CUDA_MEMORY_CACHING") ||
                                  environment_is_set("PYTORCH_NO_HIP_MEMORY_CACHING")) {
  TorchAllocator* none = nullptr;
  TORCH_INTERNAL_ASSERT(the_allocator.compare_exchange_strong(none, this),
                        "gpumemx: a second torch allocator in one process");
}

// --- allocating and freeing

Device& TorchAllocator::open(c10::DeviceIndex device) {
  if (Device* d = devices_.if_open(device); C10_LIKELY(d != nullptr)) return *d;
  const auto opened = devices_.device(device);
  TORCH_CHECK(opened.ok(), "gpumemx can't use CUDA device ", static_cast<int>(device), ": ",
              opened.error().where, " (", to_string(opened.error().code), ")");
  return *opened.value();
}

// Names of streams. torch's own live as long as the process and are remembered by the thread; for
// any other the driver is asked each time, since its handle may have come back for another stream.
StreamInfo TorchAllocator::stream_info(Device& device, c10::DeviceIndex index, cudaStream_t stream,
                                       bool known_permanent) {
  struct Known {
    std::uint64_t key = ~0ull;
    StreamInfo info;
  };
  thread_local std::array<Known, 64> known;
  const auto native = reinterpret_cast<std::uintptr_t>(stream);
  const std::uint64_t key = native * 64 + static_cast<std::uint64_t>(index);
  Known& slot = known[(native / 64 + static_cast<std::uint64_t>(index)) % known.size()];
  if (slot.key == key) return slot.info;
  const auto id = device.counting->stream_id(native);
  TORCH_CHECK(id.ok(), "gpumemx: the driver does not know the stream ", stream, ": ",
              id.error().where);
  StreamInfo info{{id.value(), native}, known_permanent || is_torch_stream(index, stream)};
  if (info.permanent) slot = {key, info};
  return info;
}

// Whether `stream` is the device's default stream or one of torch's pool. Asking the pool for as
// many streams as it has visits each of them once and leaves its round robin where it was.
bool TorchAllocator::is_torch_stream(c10::DeviceIndex device, cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return true;
  if (stream == cudaStreamPerThread) return false;  // a stream of its own for each thread
  MutexLock lock(mu_);
  if ((streams_listed_ >> device & 1) == 0) {
    constexpr int kStreamsPerPool = 32;
    for (const bool high_priority : {false, true}) {
      for (int i = 0; i < kStreamsPerPool; ++i) {
        torch_streams_.push_back(reinterpret_cast<std::uintptr_t>(
            c10::cuda::getStreamFromPool(high_priority, device).stream()));
      }
    }
    std::sort(torch_streams_.begin(), torch_streams_.end());
    streams_listed_ |= 1ull << device;
  }
  return std::binary_search(torch_streams_.begin(), torch_streams_.end(),
                            reinterpret_cast<std::uintptr_t>(stream));
}

void* TorchAllocator::allocate_on(c10::DeviceIndex device, std::size_t nbytes,
                                  const StreamInfo& stream) {
  AllocResult result =
      open(device).allocator->allocate({{nbytes}, stream, kDefaultPool, 0, nullptr});
  if (C10_UNLIKELY(!result.ok())) raise_out_of_memory(device, *result.failure);
  void* ptr = pointer_to(result.address);
  tell_allocated(device, ptr, result.size);
  return ptr;
}

void TorchAllocator::tell_allocated(c10::DeviceIndex device, void* ptr, Bytes size) {
  if (const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
      C10_UNLIKELY(interp)) {
    (*interp)->trace_gpu_memory_allocation(c10::kCUDA, address_of(ptr).n);
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    report(device, ptr, static_cast<std::int64_t>(size.n));
  }
}

c10::DataPtr TorchAllocator::allocate(std::size_t nbytes) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  const c10::Device where(c10::kCUDA, device);
  if (C10_UNLIKELY(!isEnabled())) {
    void* ptr = nullptr;
    if (nbytes != 0) {
      C10_CUDA_CHECK(cudaMalloc(&ptr, nbytes));
      if (const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
          C10_UNLIKELY(interp)) {
        (*interp)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
      }
    }
    return {ptr, ptr, &delete_uncached, where};
  }
  if (nbytes == 0) return {nullptr, nullptr, &delete_block, where};
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  // c10's ids: 0 is the default stream, odd ones are of its pools, even ones are external pointers.
  const bool permanent = stream.id() == 0 || (stream.id() & 1) != 0;
  void* ptr =
      allocate_on(device, nbytes, stream_info(open(device), device, stream.stream(), permanent));
  return {ptr, ptr, &delete_block, where};
}

c10::DeleterFnPtr TorchAllocator::raw_deleter() const {
  return isEnabled() ? &delete_block : &delete_uncached;
}

void* TorchAllocator::raw_alloc(std::size_t nbytes) {
  if (nbytes == 0) return nullptr;
  const c10::DeviceIndex device = c10::cuda::current_device();
  return raw_alloc_with_stream(nbytes, c10::cuda::getCurrentCUDAStream(device).stream());
}

void* TorchAllocator::raw_alloc_with_stream(std::size_t nbytes, cudaStream_t stream) {
  if (nbytes == 0) return nullptr;
  const c10::DeviceIndex device = c10::cuda::current_device();
  return allocate_on(device, nbytes, stream_info(open(device), device, stream, false));
}

void TorchAllocator::raw_delete(void* ptr) {
  if (ptr == nullptr || devices_.is_shut_down()) return;
  const int device = devices_.owner_of(address_of(ptr));
  if (C10_UNLIKELY(device < 0)) {
    TORCH_CHECK(previous_ != nullptr, "invalid device pointer: ", ptr,
                " is not memory of gpumemx, nor was anything allocated before it was installed");
    previous_->raw_delete(ptr);
    return;
  }
  Device& d = *devices_.if_open(device);
  if (const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
      C10_UNLIKELY(interp)) {
    (*interp)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
  }
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    const auto block = d.allocator->find_block(address_of(ptr));
    if (block && d.allocator->free_if_live(address_of(ptr))) {
      report(static_cast<c10::DeviceIndex>(device), ptr, -static_cast<std::int64_t>(block->size.n));
      return;
    }
  } else if (C10_LIKELY(d.allocator->free_if_live(address_of(ptr)))) {
    return;
  }
  TORCH_CHECK(false, "invalid device pointer: ", ptr,
              " is not the begin of a live block (freed twice, or not what was allocated)");
}

void TorchAllocator::report(c10::DeviceIndex device, void* ptr, std::int64_t change) {
  const Stats stats = devices_.if_open(device)->allocator->stats();
  c10::reportMemoryUsageToProfiler(
      ptr, change, static_cast<std::size_t>(stats.allocated_bytes.all().current),
      static_cast<std::size_t>(stats.reserved_bytes.all().current), {c10::kCUDA, device});
}

void TorchAllocator::copy_data(void* dest, const void* src, std::size_t count) const {
  C10_CUDA_CHECK(cudaMemcpy(dest, src, count, cudaMemcpyDeviceToDevice));
}

void TorchAllocator::recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) {
  if (ptr.get() == nullptr) return;
  const int device = devices_.owner_of(address_of(ptr.get()));
  if (device < 0) {
    // Not of this allocator (imported from another process, or older): its own deleter tells.
    if (previous_ != nullptr && ptr.get_deleter() == previous_->raw_deleter()) {
      previous_->recordStream(ptr, stream);
    }
    return;
  }
  if (ptr.get_deleter() != &delete_block) return;
  Device& d = *devices_.if_open(device);
  const bool permanent = stream.id() == 0 || (stream.id() & 1) != 0;
  d.allocator->record_stream(
      address_of(ptr.get()),
      stream_info(d, static_cast<c10::DeviceIndex>(device), stream.stream(), permanent));
}

// --- out of memory

bool TorchAllocator::on_pressure(const PressureInfo& info) {
  (void)info;
  bool freed = false;
  auto* registry = c10::FreeCudaMemoryCallbacksRegistry();
  for (const auto& name : registry->Keys()) freed = registry->Create(name)->Execute() || freed;
  return freed;
}

void TorchAllocator::raise_out_of_memory(c10::DeviceIndex device, const OomVerdict& v) {
  const c10::Device where(c10::kCUDA, device);
  c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(v.requested.n), v.live.n, v.reserved.n,
                                   where);
  std::vector<torch_alloc::OutOfMemoryObserver> observers;
  {
    MutexLock lock(mu_);
    observers = oom_observers_;
  }
  for (const auto& observer : observers) {
    observer(device, v.block.n, std::min(v.cap, v.device_total).n, v.device_free.n);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, out_of_memory_text(device, v));
  std::abort();  // not reached
}

void TorchAllocator::attachOutOfMemoryObserver(torch_alloc::OutOfMemoryObserver observer) {
  MutexLock lock(mu_);
  oom_observers_.push_back(std::move(observer));
}

void TorchAllocator::attachOomRejectionObserver(RejectionObserver observer) {
  // Called only under throw_on_cudamalloc_oom, which gpumemx.settings() lists as not served.
  (void)observer;
}

// --- devices, limits, statistics

bool TorchAllocator::initialized() { return devices_.device_count() > 0; }

void TorchAllocator::init(int device_count) {
  devices_.set_device_count(device_count);
  if (previous_ != nullptr && !previous_->initialized()) previous_->init(device_count);
}

namespace {

void check_index(c10::DeviceIndex device) {
  TORCH_CHECK_INDEX(device >= 0 && device < DeviceRegistry::kMaxDevices,
                    "gpumemx: there is no CUDA device ", static_cast<int>(device));
}

}  // namespace

double TorchAllocator::getMemoryFraction(c10::DeviceIndex device) {
  check_index(device);
  return devices_.fraction(device);
}

void TorchAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  TORCH_CHECK_VALUE(fraction >= 0 && fraction <= 1, "invalid fraction: ", fraction,
                    ". Please set within [0, 1].");
  check_index(device);
  devices_.set_fraction(device, fraction);
}

void TorchAllocator::enable(bool value) { caching_ = value; }
bool TorchAllocator::isEnabled() const { return caching_ && !caching_off_by_environment_; }

void TorchAllocator::emptyCache(c10::MempoolId_t pool) {
  if (pool != c10::MempoolId_t{0, 0}) return;  // there are no private pools
  for (int i = 0; i < devices_.device_count(); ++i) {
    if (Device* device = devices_.if_open(i)) (void)device->allocator->trim({});
  }
  if (previous_ != nullptr && previous_->initialized()) previous_->emptyCache(pool);
}

torch_alloc::DeviceStats TorchAllocator::getDeviceStats(c10::DeviceIndex device) {
  const Device* d = devices_.if_open(device);
  return d == nullptr ? torch_alloc::DeviceStats{} : to_torch(d->allocator->stats());
}

void TorchAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  if (Device* d = devices_.if_open(device)) d->allocator->reset_accumulated();
}

void TorchAllocator::resetPeakStats(c10::DeviceIndex device) {
  if (Device* d = devices_.if_open(device)) d->allocator->reset_peaks();
}

std::vector<torch_alloc::StreamSegmentSize> TorchAllocator::getExpandableSegmentSizes(
    c10::DeviceIndex device) {
  std::vector<torch_alloc::StreamSegmentSize> sizes;
  const Device* d = devices_.if_open(device);
  if (d == nullptr) return sizes;
  for (const BlockInfo& b : d->allocator->blocks()) {
    if (is_plain(b.heap)) continue;
    auto stream = reinterpret_cast<cudaStream_t>(b.stream.native);  // NOLINT: a CUstream
    const auto same = std::find_if(sizes.begin(), sizes.end(), [&](const auto& s) {
      return s.stream == stream && s.is_small_pool == is_small(b.heap);
    });
    if (same != sizes.end()) {
      same->total_size += b.size.n;
    } else {
      sizes.emplace_back(stream, is_small(b.heap), b.size.n);
    }
  }
  return sizes;
}

void TorchAllocator::cacheInfo(c10::DeviceIndex device, std::size_t* largest_block) {
  Device& d = open(device);
  // In and out: 0 asks for what the device has free to be counted too.
  if (*largest_block == 0) {
    if (const auto memory = d.counting->memory(); memory.ok()) {
      *largest_block = memory.value().free.n;
    }
  }
  *largest_block = std::max<std::size_t>(*largest_block, d.allocator->largest_cached().n);
}

void* TorchAllocator::getBaseAllocation(void* ptr, std::size_t* size) {
  const int device = devices_.owner_of(address_of(ptr));
  if (device < 0 && previous_ != nullptr) return previous_->getBaseAllocation(ptr, size);
  TORCH_CHECK(device >= 0, "invalid device pointer: ", ptr);
  const auto segment = devices_.if_open(device)->allocator->segment_of(address_of(ptr));
  TORCH_CHECK(segment, "invalid device pointer: ", ptr, ": no memory stands there");
  if (size != nullptr) *size = segment->size.n;
  return pointer_to(segment->begin);
}

torch_alloc::SnapshotInfo TorchAllocator::snapshot(c10::MempoolId_t pool, bool include_traces) {
  (void)
      include_traces;  // there is no history yet; an empty trace a device is torch's way to say so
  torch_alloc::SnapshotInfo info;
  info.device_traces.resize(static_cast<std::size_t>(devices_.device_count()));
  if (pool == c10::MempoolId_t{0, 0}) {
    for (int i = 0; i < devices_.device_count(); ++i) {
      const Device* device = devices_.if_open(i);
      if (device == nullptr) continue;
      for (auto& s : to_torch(static_cast<c10::DeviceIndex>(i), device->allocator->blocks())) {
        info.segments.push_back(std::move(s));
      }
    }
  }
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  info.config_metadata.max_split_size = Config::max_split_size();
  info.config_metadata.garbage_collection_threshold = Config::garbage_collection_threshold();
  info.config_metadata.expandable_segments = Config::use_expandable_segments();
  info.config_metadata.last_allocator_settings = c10::CachingAllocator::getAllocatorSettings();
  info.config_metadata.roundup_power2_divisions = Config::roundup_power2_divisions();
  using CudaConfig = torch_alloc::CUDAAllocatorConfig;
  info.config_metadata.pinned_num_register_threads = CudaConfig::pinned_num_register_threads();
  info.config_metadata.release_lock_on_malloc = CudaConfig::release_lock_on_cudamalloc();
  info.config_metadata.pinned_use_host_register = CudaConfig::pinned_use_cuda_host_register();
  info.config_metadata.graph_capture_record_stream_reuse =
      CudaConfig::graph_capture_record_stream_reuse();
  return info;
}

// --- several devices

void TorchAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex accessed) {
  if (device == accessed) return;
  {
    // For plain memory and that of libraries; mapped memory takes a call for each mapping.
    const c10::cuda::CUDAGuard guard(device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(accessed, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      C10_CUDA_CHECK(error);
    }
  }
  add_peer(accessed, device);
  if (previous_ != nullptr && previous_->initialized()) {
    previous_->enablePeerAccess(device, accessed);
  }
}

void TorchAllocator::add_peer(c10::DeviceIndex device, c10::DeviceIndex peer) {
  const Status done = open(device).allocator->add_peer(peer);
  TORCH_CHECK(done.ok(), "gpumemx: device ", static_cast<int>(peer),
              " can't be given access to the memory of device ", static_cast<int>(device), ": ",
              done.error().where);
}

cudaError_t TorchAllocator::memcpyAsync(void* dst, int dst_device, const void* src, int src_device,
                                        std::size_t count, cudaStream_t stream, bool p2p_enabled) {
  if (p2p_enabled || dst_device == src_device) {
    return cudaMemcpyAsync(dst, src, count, cudaMemcpyDeviceToDevice, stream);
  }
  // Mapped memory that the other device has no access to is copied by this call alone; plain memory
  // is too.
  return cudaMemcpyPeerAsync(dst, dst_device, src, src_device, count, stream);
}

// --- several processes

torch_alloc::ShareableHandle TorchAllocator::shareIpcHandle(void* ptr) {
  const int device = devices_.owner_of(address_of(ptr));
  if (device < 0 && previous_ != nullptr) return previous_->shareIpcHandle(ptr);
  TORCH_CHECK(device >= 0, "invalid device pointer: ", ptr);
  return SharedMemory::share(*devices_.if_open(device), address_of(ptr));
}

std::shared_ptr<void> TorchAllocator::getIpcDevPtr(std::string handle) {
  return open_shared(c10::cuda::current_device(), handle);
}

std::shared_ptr<void> TorchAllocator::open_shared(c10::DeviceIndex device,
                                                  const std::string& handle) {
  return shared_.open(open(device), handle);
}

// --- a block at an address

c10::DataPtr TorchAllocator::allocateWithAddress(std::size_t nbytes, void* address) {
  const c10::DeviceIndex device = c10::cuda::current_device();
  const c10::Device where(c10::kCUDA, device);
  TORCH_CHECK(isEnabled(), "gpumemx: allocating at an address needs the cache, which is off");
  if (nbytes == 0) return {nullptr, nullptr, &delete_block, where};
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  void* ptr = allocate_at(device, nbytes, stream_info(open(device), device, stream.stream(), false),
                          address);
  return {ptr, ptr, &delete_block, where};
}

void* TorchAllocator::allocate_at(c10::DeviceIndex device, std::size_t nbytes,
                                  const StreamInfo& stream, void* address) {
  TORCH_CHECK(address_of(address).n % kGranule.n == 0, "an exact address must be a multiple of ",
              kGranule.n, ": ", address);
  const auto result = open(device).allocator->allocate_at(
      {{nbytes}, stream, kDefaultPool, 0, nullptr}, address_of(address));
  TORCH_CHECK(result, "Could not allocate CUDA storage at exact address ", address,
              ": gpumemx has no ", nbytes, " bytes free there on the current stream");
  tell_allocated(device, address, result->size);
  return address;
}

void TorchAllocator::attachAllocatorTraceTracker(torch_alloc::AllocatorTraceTracker tracker) {
  (void)tracker;
  TORCH_WARN_ONCE("gpumemx: trace trackers (NCCL's registration of segments) are not called yet");
}

// --- not there yet

void TorchAllocator::beginAllocateToPool(c10::DeviceIndex, c10::MempoolId_t,
                                         std::function<bool(cudaStream_t)>) {
  not_yet("CUDA graphs and private memory pools");
}
void TorchAllocator::endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t) {
  not_yet("CUDA graphs and private memory pools");
}
void TorchAllocator::releasePool(c10::DeviceIndex, c10::MempoolId_t) {
  not_yet("CUDA graphs and private memory pools");
}
int TorchAllocator::getPoolUseCount(c10::DeviceIndex, c10::MempoolId_t) {
  not_yet("private memory pools");
}
void TorchAllocator::createOrIncrefPool(c10::DeviceIndex, c10::MempoolId_t,
                                        std::shared_ptr<CUDAAllocator>) {
  not_yet("private memory pools");
}
void TorchAllocator::setUseOnOOM(c10::DeviceIndex, c10::MempoolId_t, bool) {
  not_yet("private memory pools");
}
void TorchAllocator::setNoSplit(c10::DeviceIndex, c10::MempoolId_t) {
  not_yet("private memory pools");
}
bool TorchAllocator::checkPoolLiveAllocations(c10::DeviceIndex, c10::MempoolId_t,
                                              const std::unordered_set<void*>&) {
  not_yet("private memory pools");
}
bool TorchAllocator::isHistoryEnabled() { return false; }
void TorchAllocator::recordHistory(bool enabled, torch_alloc::CreateContextFn, std::size_t,
                                   torch_alloc::RecordContext, bool,
                                   const std::vector<std::string>&) {
  if (enabled) not_yet("the memory history");
}
std::shared_ptr<torch_alloc::AllocatorState> TorchAllocator::getCheckpointState(c10::DeviceIndex,
                                                                                c10::MempoolId_t) {
  not_yet("checkpoints of private memory pools");
}
torch_alloc::CheckpointDelta TorchAllocator::setCheckpointPoolState(
    c10::DeviceIndex, std::shared_ptr<torch_alloc::AllocatorState>) {
  not_yet("checkpoints of private memory pools");
}

// torch's own name: programs and torch's own configuration check for it. gpumemx.is_installed()
// tells the two apart.
std::string TorchAllocator::name() { return "native"; }

static_assert(!std::is_abstract_v<TorchAllocator>,
              "this torch declares a pure virtual that gpumemx does not implement: "
              "see docs/adding-a-torch-version.md");

}  // namespace gpumemx::adapter
