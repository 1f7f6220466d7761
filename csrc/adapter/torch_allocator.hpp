// SPDX-License-Identifier: BSD-3-Clause
//
// torch's CUDA allocator, played by gpumemx: every virtual of c10::cuda's CUDAAllocator, translated.
// It decides nothing; what it says about memory comes from the devices' allocators.
//
// torch adds virtuals between minor releases, some in the middle of the class. The methods below
// that only newer ones declare carry no `override` and name no new type, so one source serves all;
// the static_assert at the end of torch_allocator.cpp says when a pure one was added upstream
// (docs/adding-a-torch-version.md). A binary serves one minor release (install.cpp checks).
//
// What is not there yet raises an error that says so (not_yet()); nothing pretends.
//
// Lives for ever: tensors are freed in static destructors. Threads: any, at any time.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "adapter/history.hpp"
#include "adapter/ipc.hpp"
#include "adapter/oom_reports.hpp"
#include "adapter/private_pools.hpp"
#include "base/mutex.hpp"
#include "core/observer.hpp"
#include "runtime/registry.hpp"

namespace gpumemx::adapter {

namespace torch_alloc = c10::cuda::CUDACachingAllocator;

class TorchAllocator final : public torch_alloc::CUDAAllocator, public Observer {
 public:
  // `previous` gets every pointer that is not ours: blocks from before a late installation.
  // `simulated`: the devices are, and torch has no streams.
  TorchAllocator(DeviceRegistry& devices, torch_alloc::CUDAAllocator* previous, bool simulated);

  // Whether there may be blocks that `previous` allocated.
  bool was_late() const { return previous_ != nullptr; }
  // torch's own allocator, if it has blocks from before the installation.
  torch_alloc::CUDAAllocator* earlier() const {
    return previous_ != nullptr && previous_->initialized() ? previous_ : nullptr;
  }

  // Those of torch's settings that have work here; again when they have changed.
  void read_torch_settings();

  // For tests on a simulated device, where torch has no current device or stream.
  void* allocate_on(c10::DeviceIndex device, std::size_t nbytes, const StreamInfo& stream);
  void* allocate_at(c10::DeviceIndex device, std::size_t nbytes, const StreamInfo& stream,
                    void* address);
  std::shared_ptr<void> open_shared(c10::DeviceIndex device, const std::string& handle);
  void add_peer(c10::DeviceIndex device, c10::DeviceIndex peer);
  // Memory of other processes that is open here.
  std::vector<DeviceAddr> shared_addresses() const { return shared_.open_addresses(); }
  // What the live block at `address` stands on, and its device; nothing for what is not ours.
  std::optional<std::pair<int, BlockMemory>> memory_behind(DeviceAddr address) const;

  // c10::Allocator
  c10::DataPtr allocate(std::size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dest, const void* src, std::size_t count) const override;

  // c10::DeviceAllocator
  bool initialized() override;
  void emptyCache(c10::MempoolId_t pool) override;
  torch_alloc::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;

  // CUDAAllocator
  void* raw_alloc(std::size_t nbytes) override;
  void* raw_alloc_with_stream(std::size_t nbytes, cudaStream_t stream) override;
  void raw_delete(void* ptr) override;
  void init(int device_count) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  std::vector<torch_alloc::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override;
  void enable(bool value) override;
  bool isEnabled() const override;
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest_block) override;
  void* getBaseAllocation(void* ptr, std::size_t* size) override;
  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& ptr, c10::cuda::CUDAStream stream) override;
  torch_alloc::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override;
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override;
  torch_alloc::ShareableHandle shareIpcHandle(void* ptr) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  bool isHistoryEnabled() override;
  void recordHistory(bool enabled, torch_alloc::CreateContextFn recorder, std::size_t max_entries,
                     torch_alloc::RecordContext when, bool clear,
                     const std::vector<std::string>& skip_actions) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override;
  void pushCompileContext(std::string& context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void attachOutOfMemoryObserver(torch_alloc::OutOfMemoryObserver observer) override;
  void attachAllocatorTraceTracker(torch_alloc::AllocatorTraceTracker tracker) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex accessed) override;
  cudaError_t memcpyAsync(void* dst, int dst_device, const void* src, int src_device,
                          std::size_t count, cudaStream_t stream, bool p2p_enabled) override;
  std::shared_ptr<torch_alloc::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                                  c10::MempoolId_t pool) override;
  torch_alloc::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<torch_alloc::AllocatorState> state) override;
  std::string name() override;

  // Overrides from torch 2.12 on; before, functions of ours that nobody calls.
  using RejectionObserver =
      std::function<void(std::int64_t device, std::size_t alloc_size, std::size_t total_allocated,
                         std::size_t device_total)>;
  void attachOomRejectionObserver(RejectionObserver observer);
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* ptr);
  // From torch 2.13 on.
  c10::DataPtr allocateWithAddress(std::size_t nbytes, void* address);
  // From torch 2.14 on.
  bool supportsUserMetadata();
  void annotateMemory(const void* ptr, const std::string& metadata);

  MemoryHistory& memory_history() { return history_; }
  OomReports& oom_reports() { return oom_reports_; }
  void markCaptureBegin(c10::DeviceIndex device);
  void markCaptureEnd(c10::DeviceIndex device);

 private:
  // Observer: what the core asks and tells, with none of its locks held.
  bool on_pressure(const PressureInfo& info) override;

  Device& open(c10::DeviceIndex device);
  bool is_to_be_registered(c10::MempoolId_t pool);
  StreamInfo stream_info(Device& device, c10::DeviceIndex index, cudaStream_t stream,
                         bool known_permanent);
  bool is_torch_stream(c10::DeviceIndex device, cudaStream_t stream);
  bool delete_if_uncached(void* ptr);
  c10::DeviceIndex current_device() const;
  gpumemx::DeviceAllocator& core(c10::DeviceIndex device) { return *open(device).allocator; }
  void note_torch_streams(c10::DeviceIndex device);
  template <class Allocate>
  auto routed(c10::DeviceIndex device, AllocRequest& request, Allocate allocate);
  [[noreturn]] void raise_out_of_memory(c10::DeviceIndex device, const OomVerdict& verdict);
  [[noreturn]] void raise_rejection(c10::DeviceIndex device, const OomVerdict& verdict);
  [[noreturn]] void raise_with_report(c10::DeviceIndex device, const OomVerdict& verdict);
  void report(c10::DeviceIndex device, void* ptr, std::int64_t change);
  void tell_allocated(c10::DeviceIndex device, void* ptr, Bytes size);

  DeviceRegistry& devices_;
  MemoryHistory history_;
  OomReports oom_reports_;
  torch_alloc::CUDAAllocator* const previous_;
  SharedMemory shared_;
  std::atomic<bool> caching_{true};
  std::atomic<bool> reject_above_cap_{false};  // throw_on_cudamalloc_oom
  const bool caching_off_by_environment_;
  const bool is_simulated_;
  PrivatePools pools_;

  Mutex mu_;  // a leaf
  std::vector<torch_alloc::OutOfMemoryObserver> oom_observers_ GPUMEMX_GUARDED_BY(mu_);
  std::vector<RejectionObserver> rejection_observers_ GPUMEMX_GUARDED_BY(mu_);
  std::vector<std::uint64_t> torch_streams_ GPUMEMX_GUARDED_BY(mu_);  // native handles, sorted
  std::uint64_t streams_listed_ GPUMEMX_GUARDED_BY(mu_) = 0;          // a bit a device
  std::unordered_set<void*> uncached_ GPUMEMX_GUARDED_BY(mu_);        // see delete_if_uncached()
};

}  // namespace gpumemx::adapter
