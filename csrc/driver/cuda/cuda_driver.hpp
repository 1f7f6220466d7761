// SPDX-License-Identifier: BSD-3-Clause
//
// DeviceDriver over libcuda, in the device's primary context: the one that the CUDA runtime and
// torch use. Nothing of <cuda.h> shows here, so that layers above compile without it.
//
// A small book of handles, mappings and reservations stands before the driver: some calls out of
// order it would carry out (release of a mapped handle) or crash on (a stale handle).
//
// Threads: every method may be called from any thread, with any or no context current; what was
// current is current again on return. The book's lock is never held across a driver call.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/mutex.hpp"
#include "driver/device_driver.hpp"

struct CUctx_st;
struct CUevent_st;

namespace gpumemx {

struct EntryPoints;

class CudaDriver final : public DeviceDriver {
 public:
  // Starts CUDA on `device`, an ordinal. Where virtual memory is missing or fails a real create +
  // map + set_access, the driver opens in plain mode: see traits(). May take a second.
  // Fails: kUnsupported without a CUDA driver; kInvalidArgument without such a device.
  static Result<std::unique_ptr<CudaDriver>> open(int device);
  ~CudaDriver() override;

  const DeviceTraits& traits() const noexcept override { return traits_; }
  Result<AddrRange> reserve(Bytes size, Bytes alignment) override GPUMEMX_EXCLUDES(mu_);
  Status unreserve(AddrRange range) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> create(Bytes size) override GPUMEMX_EXCLUDES(mu_);
  Status release(HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  Status map(AddrRange range, HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  using DeviceDriver::set_access;
  Status set_access(AddrRange range, const std::vector<int>& peers) override GPUMEMX_EXCLUDES(mu_);
  Status unmap(AddrRange range) override GPUMEMX_EXCLUDES(mu_);
  Result<int> export_handle(HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> import_handle(int fd) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> import_fabric(const FabricHandle& exported) override GPUMEMX_EXCLUDES(mu_);
  Result<DeviceAddr> allocate(Bytes size) override;
  Status free(DeviceAddr address) override;
  Result<StreamId> stream_id(std::uint64_t native) override;
  Result<EventId> record(StreamRef stream) override GPUMEMX_EXCLUDES(events_mu_);
  Result<bool> query(EventId event) override;
  Status wait(EventId event) override;
  Result<std::size_t> wait_any(const std::vector<EventId>& events) override;
  void recycle(EventId event) override GPUMEMX_EXCLUDES(events_mu_);
  CaptureMode exchange_capture_mode(CaptureMode mode) override;
  Result<DeviceMemory> memory() override;
  Status synchronize() override;
  Status copy(DeviceAddr to, DeviceAddr from, Bytes size) override;
  Result<HoldId> hold(const std::vector<StreamRef>& streams) override
      GPUMEMX_EXCLUDES(mu_, events_mu_);
  void let_go(HoldId hold) override GPUMEMX_EXCLUDES(mu_);

  // The CUmemGenericAllocationHandle behind `handle`, or 0.
  std::uint64_t native_handle(HandleId handle) const GPUMEMX_EXCLUDES(mu_);
  int device() const { return device_; }

 private:
  class ContextScope;
  struct Handle {
    std::uint64_t native = 0;
    Bytes size;  // zero when imported: the driver does not tell
    std::uint64_t mappings = 0;
    int fd = -1;  // exported as; closed with the handle
  };
  class Gate;  // what held streams wait at
  struct Mapping {
    Bytes size;
    HandleId handle;
  };

  CudaDriver(const EntryPoints& cu, int device, CUctx_st* context);

  void probe();
  bool probe_virtual_memory();
  int attribute(int which) const;
  // `result` is a CUresult.
  Error fail(const char* call, int result, Bytes size = {});
  Result<StreamId> id_here(std::uint64_t native);  // of the current context's stream
  Result<CUctx_st*> context_of(StreamRef stream) GPUMEMX_EXCLUDES(mu_);
  static Error misuse(const char* call, const char* rule, Bytes size = {});
  Result<HandleId> add_handle(std::uint64_t native, Bytes size) GPUMEMX_EXCLUDES(mu_);
  bool is_union_of_mappings(AddrRange range) const GPUMEMX_REQUIRES(mu_);
  bool is_mapped_in(AddrRange range) const GPUMEMX_REQUIRES(mu_);
  bool is_reserved(AddrRange range) const GPUMEMX_REQUIRES(mu_);

  const EntryPoints& cu_;
  const int device_;
  CUctx_st* const context_;
  DeviceTraits traits_;
  bool is_rdma_capable_ = false;
  std::atomic<bool> is_gone_{false};  // the driver said that it is shutting down

  mutable Mutex mu_;                                                 // a leaf
  std::map<int, CUctx_st*> other_contexts_ GPUMEMX_GUARDED_BY(mu_);  // primary ones, retained
  std::unordered_map<HandleId, Handle> handles_ GPUMEMX_GUARDED_BY(mu_);
  std::map<DeviceAddr, Mapping> mappings_ GPUMEMX_GUARDED_BY(mu_);
  std::map<DeviceAddr, Bytes> reserved_ GPUMEMX_GUARDED_BY(mu_);
  std::uint64_t next_handle_ GPUMEMX_GUARDED_BY(mu_) = 1;
  std::unordered_map<HoldId, std::shared_ptr<Gate>> gates_ GPUMEMX_GUARDED_BY(mu_);
  std::uint64_t next_hold_ GPUMEMX_GUARDED_BY(mu_) = 1;

  Mutex events_mu_;  // a leaf
  std::vector<CUevent_st*> idle_events_ GPUMEMX_GUARDED_BY(events_mu_);
  // On streams of other devices: an event can only be recorded in the context it was made in.
  std::unordered_set<CUevent_st*> other_events_ GPUMEMX_GUARDED_BY(events_mu_);
};

}  // namespace gpumemx
