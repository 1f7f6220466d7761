// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/torch_allocator.hpp"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

#include "adapter/convert.hpp"
#include "adapter/install.hpp"
#include "base/version.hpp"

namespace gpumemx::adapter {

namespace {

// The deleter is a plain function, compared by address in several places of torch, so it finds its
// allocator here. Set once, by the one allocator that a process makes, and never reset.
std::atomic<TorchAllocator*> the_allocator{nullptr};

void delete_block(void* ptr) { the_allocator.load(std::memory_order_relaxed)->raw_delete(ptr); }

// With caching off (PYTORCH_NO_CUDA_MEMORY_CACHING, enable(false)): as torch's own, straight through.
void* allocate_uncached(std::size_t nbytes) {
  void* ptr = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&ptr, nbytes));
  if (const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
      C10_UNLIKELY(interp)) {
    (*interp)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
  }
  return ptr;
}

void delete_uncached(void* ptr) {
  if (const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
      C10_UNLIKELY(interp)) {
    (*interp)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
  }
  C10_CUDA_CHECK(cudaFree(ptr));
}

constexpr int kStreamsPerPool = 32;  // of torch's, for each priority

bool environment_is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' && std::string(value) != "0";
}

// From torch 2.12 on.
template <class Config>
bool throws_above_fraction() {
  if constexpr (requires { Config::throw_on_cudamalloc_oom(); }) {
    return Config::throw_on_cudamalloc_oom();
  } else {
    return false;
  }
}

DeviceAddr address_of(const void* ptr) { return {reinterpret_cast<std::uintptr_t>(ptr)}; }
void* pointer_to(DeviceAddr a) { return reinterpret_cast<void*>(a.n); }  // NOLINT: device memory

}  // namespace

TorchAllocator::TorchAllocator(DeviceRegistry& devices, torch_alloc::CUDAAllocator* previous,
                               bool simulated)
    : devices_(devices),
      history_(devices),
      previous_(previous),
      caching_off_by_environment_(environment_is_set("PYTORCH_NO_CUDA_MEMORY_CACHING") ||
                                  environment_is_set("PYTORCH_NO_HIP_MEMORY_CACHING")),
      is_simulated_(simulated),
      pools_(simulated) {
  TorchAllocator* none = nullptr;
  TORCH_INTERNAL_ASSERT(the_allocator.compare_exchange_strong(none, this),
                        "gpumemx: a second torch allocator in one process");
  read_torch_settings();
}

void TorchAllocator::read_torch_settings() {
  reject_above_cap_ = throws_above_fraction<torch_alloc::CUDAAllocatorConfig>();
}

// --- allocating and freeing

Device& TorchAllocator::open(c10::DeviceIndex device) {
  if (Device* d = devices_.if_open(device); C10_LIKELY(d != nullptr)) return *d;
  const auto opened = devices_.device(device);
  TORCH_CHECK(opened.ok(), "gpumemx can't use CUDA device ", static_cast<int>(device), ": ",
              opened.error().where, " (", to_string(opened.error().code), ")");
  return *opened.value();
}

// Names of streams. torch's own live as long as the process: their handles are names, and the thread
// remembers them. For any other the driver is asked each time, since its handle may have come back for
// another stream.
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
  // A simulated device has streams of its own, which torch does not know.
  if (!is_simulated_ && (known_permanent || is_torch_stream(index, stream))) {
    // The default stream has two handles.
    const std::uint64_t name = stream == cudaStreamLegacy ? 0 : native;
    slot = {key, {{id_of_permanent(name), native}, true}};
    return slot.info;
  }
  const auto id = device.counting->stream_id(native);
  TORCH_CHECK(id.ok(), "gpumemx: the driver does not know the stream ", text_of(stream), ": ",
              id.error().where);
  return {{id.value(), native}, known_permanent || stream == nullptr};
}

// Whether `stream` is the device's default stream or one of torch's pool. Asking the pool for as
// many streams as it has visits each of them once and leaves its round robin where it was.
bool TorchAllocator::is_torch_stream(c10::DeviceIndex device, cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return true;
  if (stream == cudaStreamPerThread) return false;  // a stream of its own for each thread
  MutexLock lock(mu_);
  if ((streams_listed_ >> device & 1) == 0) {
    // They are made at the first call, which would end others' captures in global mode.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
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

// Calls allocate(request) with the pool in it that torch routes to at this moment.
template <class Allocate>
auto TorchAllocator::routed(c10::DeviceIndex device, AllocRequest& request, Allocate allocate) {
  if (C10_LIKELY(!pools_.is_routing(device))) return allocate(request);
  const PrivatePools::Use pool = pools_.route(
      core(device), device, reinterpret_cast<cudaStream_t>(request.stream.ref.native));  // NOLINT
  request.stream.capturing = pool.in_capture();
  request.pool = pool.pool();
  return allocate(request);
}

void* TorchAllocator::allocate_on(c10::DeviceIndex device, std::size_t nbytes,
                                  const StreamInfo& stream) {
  gpumemx::DeviceAllocator& allocator = core(device);
  const Because because(history_, torch_alloc::RecordContext::STATE);
  AllocRequest request{{nbytes},          stream,
                       kDefaultPool,      0,
                       because.context(), reject_above_cap_.load(std::memory_order_relaxed)};
  AllocResult result =
      routed(device, request, [&](const AllocRequest& r) { return allocator.allocate(r); });
  if (C10_UNLIKELY(!result.ok())) {
    if (const std::exception_ptr thrown = PrivatePools::take_thrown()) {
      std::rethrow_exception(thrown);
    }
    if (result.failure->rejected) raise_rejection(device, *result.failure);
    raise_out_of_memory(device, *result.failure);
  }
  if (const std::exception_ptr failure = because.take_failure(); C10_UNLIKELY(failure)) {
    allocator.free(result.address);  // memory that its tracker could not register is of no use
    std::rethrow_exception(failure);
  }
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

// Asking CUDA takes half of the time of an allocation, and where there is one device nobody has to.
c10::DeviceIndex TorchAllocator::current_device() const {
  return C10_LIKELY(devices_.device_count() == 1) ? c10::DeviceIndex{0}
                                                  : c10::cuda::current_device();
}

c10::DataPtr TorchAllocator::allocate(std::size_t nbytes) {
  constexpr std::size_t kExbibyte = std::size_t{1} << 60;  // the words and the limit are torch's
  TORCH_CHECK_WITH(OutOfMemoryError, nbytes < kExbibyte,
                   "CUDA out of memory. Tried to allocate more than 1EB memory.");
  const c10::DeviceIndex device = current_device();
  const c10::Device where(c10::kCUDA, device);
  if (C10_UNLIKELY(!isEnabled())) {
    void* ptr = nbytes == 0 ? nullptr : allocate_uncached(nbytes);
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
  const c10::DeviceIndex device = current_device();
  return raw_alloc_with_stream(nbytes, c10::cuda::getCurrentCUDAStream(device).stream());
}

void* TorchAllocator::raw_alloc_with_stream(std::size_t nbytes, cudaStream_t stream) {
  if (nbytes == 0) return nullptr;
  if (C10_UNLIKELY(!isEnabled())) {
    void* ptr = allocate_uncached(nbytes);
    MutexLock lock(mu_);
    uncached_.insert(ptr);
    return ptr;
  }
  const c10::DeviceIndex device = current_device();
  return allocate_on(device, nbytes, stream_info(open(device), device, stream, false));
}

// What raw_alloc() made while caching was off, whether it is on again or not.
bool TorchAllocator::delete_if_uncached(void* ptr) {
  {
    MutexLock lock(mu_);
    if (uncached_.erase(ptr) == 0) return false;
  }
  delete_uncached(ptr);
  return true;
}

void TorchAllocator::raw_delete(void* ptr) {
  if (ptr == nullptr || devices_.is_shut_down()) return;
  const int device = devices_.owner_of(address_of(ptr));
  if (C10_UNLIKELY(device < 0)) {
    if (delete_if_uncached(ptr)) return;
    TORCH_CHECK(previous_ != nullptr, "invalid device pointer: ", text_of(ptr),
                " is not memory of gpumemx, nor was anything allocated before it was installed");
    previous_->raw_delete(ptr);
    return;
  }
  Device& d = *devices_.if_open(device);
  if (const c10::impl::PyInterpreter* interp = c10::impl::GPUTrace::get_trace();
      C10_UNLIKELY(interp)) {
    (*interp)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(ptr));
  }
  const Because because(history_, torch_alloc::RecordContext::ALL);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    const auto block = d.allocator->find_block(address_of(ptr));
    if (block && d.allocator->free_if_live(address_of(ptr))) {
      report(static_cast<c10::DeviceIndex>(device), ptr, -static_cast<std::int64_t>(block->size.n));
      return;
    }
  } else if (C10_LIKELY(d.allocator->free_if_live(address_of(ptr)))) {
    return;
  }
  TORCH_CHECK(false, "invalid device pointer: ", text_of(ptr),
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
  const bool permanent = stream.id() == 0 || (stream.id() & 1) != 0;
  const c10::DeviceIndex theirs = stream.device_index();
  StreamInfo info = stream_info(open(theirs), theirs, stream.stream(), permanent);
  if (theirs != device) info.ref = of_other_device(info.ref, theirs);
  devices_.if_open(device)->allocator->record_stream(address_of(ptr.get()), info);
}

// --- out of memory

bool TorchAllocator::on_pressure(const PressureInfo& info) {
  (void)info;
  bool freed = false;
  auto* registry = c10::FreeCudaMemoryCallbacksRegistry();
  for (const auto& name : registry->Keys()) freed = registry->Create(name)->Execute() || freed;
  return freed;
}

namespace {

// Who set the cap that is in force, in words; empty for nobody.
std::string cap_source(double fraction) {
  if (fraction < 1) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "torch's memory fraction of %.3g for this process",
                  fraction);
    return text.data();
  }
  for (const SettingSet::Entry& setting : settings_in_force()) {
    if (setting.key == "cap" && setting.source != SettingSet::kDefaultSource) {
      return "cap:" + setting.value + " in " + setting.source;
    }
  }
  return "";
}

}  // namespace

void TorchAllocator::raise_with_report(c10::DeviceIndex device, const OomVerdict& v) {
  OomReport report;
  report.device = device;
  report.verdict = v;
  // In a forked child no lock may be taken: who holds it may not be there.
  if (v.cause != OomCause::kShuttingDown) {
    const gpumemx::DeviceAllocator& allocator = core(device);
    report.is_plain = allocator.options().plain;
    report.cap_source = cap_source(devices_.fraction(device));
    if (history_.recording()) report.holders = largest_holders(allocator.layout());
    report = *oom_reports_.add(std::move(report));
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, out_of_memory_text(report));
  std::abort();  // not reached
}

void TorchAllocator::raise_out_of_memory(c10::DeviceIndex device, const OomVerdict& v) {
  const c10::Device where(c10::kCUDA, device);
  c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(v.block.n), v.live.n, v.reserved.n,
                                   where);
  std::vector<torch_alloc::OutOfMemoryObserver> observers;
  {
    MutexLock lock(mu_);
    observers = oom_observers_;
  }
  for (const auto& observer : observers) {
    observer(device, v.block.n, std::min(v.cap, v.device_total).n, v.device_free.n);
  }
  raise_with_report(device, v);
}

void TorchAllocator::attachOutOfMemoryObserver(torch_alloc::OutOfMemoryObserver observer) {
  MutexLock lock(mu_);
  oom_observers_.push_back(std::move(observer));
}

// As torch's own: no retries, no out-of-memory observers, no entry in the history.
void TorchAllocator::raise_rejection(c10::DeviceIndex device, const OomVerdict& v) {
  std::vector<RejectionObserver> observers;
  {
    MutexLock lock(mu_);
    observers = rejection_observers_;
  }
  for (const auto& observer : observers) {
    try {
      observer(device, v.block.n, v.reserved.n, v.device_total.n);
    } catch (const std::exception& error) {
      LOG(ERROR) << "gpumemx: an observer of rejected allocations failed: " << error.what();
    }
  }
  raise_with_report(device, v);
}

void TorchAllocator::attachOomRejectionObserver(RejectionObserver observer) {
  MutexLock lock(mu_);
  rejection_observers_.push_back(std::move(observer));
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
  const Because because(history_, torch_alloc::RecordContext::ALL);
  const bool everything = pool == c10::MempoolId_t{0, 0};
  for (int i = 0; i < devices_.device_count(); ++i) {
    Device* device = devices_.if_open(i);
    if (device == nullptr || devices_.is_shut_down()) continue;
    if (everything) {
      devices_.empty_cache(*device);
      continue;
    }
    // A pool in use keeps its memory: a graph may be replayed on it at any time.
    const auto id = pools_.find(static_cast<c10::DeviceIndex>(i), pool);
    const auto info = id ? device->allocator->pool_info(*id) : std::nullopt;
    if (!info || info->users > 0) continue;
    (void)device->allocator->trim({.pool = *id, .wait = info->reserved > info->live});
  }
  if (previous_ != nullptr && previous_->initialized()) previous_->emptyCache(pool);
}

torch_alloc::DeviceStats TorchAllocator::getDeviceStats(c10::DeviceIndex device) {
  const Device* d = devices_.if_open(device);
  if (d == nullptr) return {};
  return to_torch(device, d->allocator->stats(), d->allocator->reserved_by_pool());
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
  TORCH_CHECK(device >= 0, "invalid device pointer: ", text_of(ptr));
  const auto segment = devices_.if_open(device)->allocator->segment_of(address_of(ptr));
  TORCH_CHECK(segment, "invalid device pointer: ", text_of(ptr), ": no memory stands there");
  if (size != nullptr) *size = segment->size.n;
  return pointer_to(segment->begin);
}

std::optional<std::pair<int, BlockMemory>> TorchAllocator::memory_behind(DeviceAddr address) const {
  const int device = devices_.owner_of(address);
  if (device < 0) return std::nullopt;
  auto memory = devices_.if_open(device)->allocator->memory_behind(address);
  if (!memory) return std::nullopt;
  return std::pair{device, *std::move(memory)};
}

// --- history, and what follows the allocator's events

torch_alloc::SnapshotInfo TorchAllocator::snapshot(c10::MempoolId_t pool, bool include_traces) {
  torch_alloc::SnapshotInfo info;
  info.config_metadata = torch_settings();
  MemoryHistory::PoolOf only;
  if (pool != c10::MempoolId_t{0, 0})
    only = [&](c10::DeviceIndex i) { return pools_.find(i, pool); };
  history_.snapshot(only, include_traces, is_to_be_registered(pool), info);
  return info;
}

// NCCL attaches its trackers, asks for a pool's segments, registers them, and follows what is allocated
// after that and freed. So the pool's memory comes in device allocations from then on, and what is
// mapped there already stays as it is: the segments that NCCL has are those that there are.
bool TorchAllocator::is_to_be_registered(c10::MempoolId_t pool) {
  if (pool.first != 0 || pool.second == 0 || !history_.has_trackers()) return false;
  bool any = false;
  for (int i = 0; i < devices_.device_count(); ++i) {
    const auto device = static_cast<c10::DeviceIndex>(i);
    const auto id = pools_.find(device, pool);
    // Those of graphs have such names too, and whoever looks at them only looks.
    if (!id || pools_.has_graphs(device, pool) || devices_.is_shut_down()) continue;
    if (!core(device).pool_info(*id)) continue;
    core(device).set_plain(*id);
    any = true;
  }
  return any;
}

bool TorchAllocator::isHistoryEnabled() { return history_.recording(); }

void TorchAllocator::recordHistory(bool enabled, torch_alloc::CreateContextFn recorder,
                                   std::size_t max_entries, torch_alloc::RecordContext when,
                                   bool clear, const std::vector<std::string>& skip_actions) {
  history_.record(enabled, recorder, max_entries, when, clear, skip_actions);
}

void TorchAllocator::recordAnnotation(
    const std::vector<std::pair<std::string, std::string>>& metadata) {
  if (!history_.recording()) return;
  c10::DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  history_.add_mark(device, metadata);
}

void TorchAllocator::pushCompileContext(std::string& context) {
  MemoryHistory::push_compile_context(context);
}
void TorchAllocator::popCompileContext() { MemoryHistory::pop_compile_context(); }

void TorchAllocator::setUserMetadata(const std::string& metadata) {
  MemoryHistory::set_user_metadata(metadata);
}
std::string TorchAllocator::getUserMetadata() { return MemoryHistory::user_metadata(); }
bool TorchAllocator::supportsUserMetadata() { return true; }

void TorchAllocator::annotateMemory(const void* ptr, const std::string& metadata) {
  history_.annotate(ptr, metadata);
}

std::shared_ptr<c10::GatheredContext> TorchAllocator::getContextForPointer(const void* ptr) {
  return history_.context_of(ptr);
}

void TorchAllocator::attachAllocatorTraceTracker(torch_alloc::AllocatorTraceTracker tracker) {
  history_.attach(std::move(tracker));
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

// --- private pools

void TorchAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                         std::function<bool(cudaStream_t)> filter) {
  pools_.begin(core(device), device, pool, std::move(filter));
}

void TorchAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  if (!devices_.is_shut_down()) pools_.end(core(device), device, pool);
}

void TorchAllocator::markCaptureBegin(c10::DeviceIndex device) {
  pools_.mark_capture(core(device), device, true);
}

void TorchAllocator::markCaptureEnd(c10::DeviceIndex device) {
  if (!devices_.is_shut_down()) pools_.mark_capture(core(device), device, false);
}

void TorchAllocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                        std::shared_ptr<CUDAAllocator> allocator) {
  if (allocator.get() == this) allocator = nullptr;  // as good as none, and would ask itself
  pools_.create_or_retain(core(device), device, pool, std::move(allocator));
}

// Pools die in destructors, also when the process ends: then there is nothing left to do.
void TorchAllocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  if (devices_.is_shut_down()) return;
  if (pools_.ends_graphs(device, pool)) note_torch_streams(device);
  pools_.release(core(device), device, pool);
}

// A graph may have been replayed on any stream, and the last release has to wait for all of them. Those
// that nothing was allocated on are not known yet. (getStreamFromPool: see is_torch_stream().)
void TorchAllocator::note_torch_streams(c10::DeviceIndex device) {
  if (is_simulated_) return;
  // See is_torch_stream().
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  Device& d = open(device);
  const auto note = [&](const c10::cuda::CUDAStream& stream) {
    d.allocator->note_stream(stream_info(d, device, stream.stream(), true));
  };
  note(c10::cuda::getDefaultCUDAStream(device));
  for (const bool high_priority : {false, true}) {
    for (int i = 0; i < kStreamsPerPool; ++i) {
      note(c10::cuda::getStreamFromPool(high_priority, device));
    }
  }
}

int TorchAllocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) {
  check_index(device);
  return pools_.users(device, pool);
}

void TorchAllocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) {
  if (devices_.is_shut_down()) return;
  const auto id = pools_.find(device, pool);
  TORCH_CHECK(id || !use_on_oom, "setUseOnOOM: there is no such memory pool");
  // Every MemPool that dies takes this back, whether it was set or not.
  if (id && core(device).pool_info(*id)) core(device).set_use_on_oom(*id, use_on_oom);
}

// Segments are not split, so each block is a device allocation of its own: the pool for memory that is
// to be registered or shared with cudaIpcGetMemHandle().
void TorchAllocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) {
  core(device).set_whole(pools_.in_use(device, pool));
}

bool TorchAllocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                              const std::unordered_set<void*>& expected) {
  const PoolCheckpoint now = core(device).checkpoint_pool(pools_.in_use(device, pool));
  return now.live.size() == expected.size() &&
         std::all_of(now.live.begin(), now.live.end(), [&](const auto& block) {
           return expected.count(pointer_to(block.address)) != 0;
         });
}

namespace {

struct CheckpointState final : torch_alloc::AllocatorState {
  c10::DeviceIndex device{};
  c10::MempoolId_t id;
  PoolCheckpoint pool;
};

}  // namespace

std::shared_ptr<torch_alloc::AllocatorState> TorchAllocator::getCheckpointState(
    c10::DeviceIndex device, c10::MempoolId_t pool) {
  auto state = std::make_shared<CheckpointState>();
  state->device = device;
  state->id = pool;
  state->pool = core(device).checkpoint_pool(pools_.in_use(device, pool));
  return state;
}

// What was live is freed and what the checkpoint has is allocated, at the same addresses; torch sorts
// out which of its tensors owns what, so a block that stays live is in both lists.
torch_alloc::CheckpointDelta TorchAllocator::setCheckpointPoolState(
    c10::DeviceIndex device, std::shared_ptr<torch_alloc::AllocatorState> state) {
  const auto checkpoint = std::dynamic_pointer_cast<CheckpointState>(state);
  TORCH_CHECK(checkpoint != nullptr && checkpoint->device == device,
              "setCheckpointPoolState: this is no checkpoint of a memory pool of device ",
              static_cast<int>(device), " that gpumemx made");
  TORCH_CHECK(pools_.in_use(device, checkpoint->id) == checkpoint->pool.pool,
              "setCheckpointPoolState: the memory pool of the checkpoint was released meanwhile");
  const Because because(history_, torch_alloc::RecordContext::STATE);
  const bool profiled = c10::memoryProfilingEnabled();
  const PoolCheckpoint before =
      profiled ? core(device).checkpoint_pool(checkpoint->pool.pool) : PoolCheckpoint{};
  const auto restored = core(device).restore_pool(checkpoint->pool);
  TORCH_CHECK(restored.ok(), "setCheckpointPoolState: ", restored.error().where);
  // All of what was live has gone and all of the checkpoint has come, as torch's own does it.
  for (const auto& b : before.live) {
    report(device, pointer_to(b.address), -static_cast<std::int64_t>(b.size.n));
  }
  if (C10_UNLIKELY(profiled)) {
    for (const auto& b : checkpoint->pool.live) {
      report(device, pointer_to(b.address), static_cast<std::int64_t>(b.size.n));
    }
  }
  torch_alloc::CheckpointDelta delta;
  for (const DeviceAddr a : restored.value().freed) delta.ptrs_freed.push_back(pointer_to(a));
  for (const DeviceAddr a : restored.value().allocated) {
    void* ptr = pointer_to(a);
    delta.dataptrs_allocd.emplace_back(ptr, ptr, &delete_block, c10::Device(c10::kCUDA, device));
  }
  return delta;
}

// --- several processes

torch_alloc::ShareableHandle TorchAllocator::shareIpcHandle(void* ptr) {
  const int device = devices_.owner_of(address_of(ptr));
  if (device < 0 && previous_ != nullptr) return previous_->shareIpcHandle(ptr);
  TORCH_CHECK(device >= 0, "invalid device pointer: ", text_of(ptr));
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
  gpumemx::DeviceAllocator& allocator = core(device);
  const Because because(history_, torch_alloc::RecordContext::STATE);
  AllocRequest request{{nbytes}, stream, kDefaultPool, 0, because.context(), false};
  const auto result = routed(device, request, [&](const AllocRequest& r) {
    return allocator.allocate_at(r, address_of(address));
  });
  TORCH_CHECK(result, "Could not allocate CUDA storage at exact address ", text_of(address),
              ": gpumemx has no ", nbytes, " bytes free there on the current stream");
  tell_allocated(device, address, result->size);
  return address;
}

// torch's own name: programs and torch's own configuration check for it. gpumemx.is_installed()
// tells the two apart.
std::string TorchAllocator::name() { return "native"; }

static_assert(!std::is_abstract_v<TorchAllocator>,
              "this torch declares a pure virtual that gpumemx does not implement: "
              "see docs/adding-a-torch-version.md");

}  // namespace gpumemx::adapter
