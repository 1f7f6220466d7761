// SPDX-License-Identifier: BSD-3-Clause
//
// torch's private pools (CUDA graphs, torch.cuda.MemPool) in terms of the core's: which of the core's
// pools a torch id means on a device, who uses it, and which pool an allocation goes to while somebody
// routes to one.
//
// A pool of torch's has a count of users; the core sees one user for all of them, and one more for
// each allocation that is under way, so that a pool never goes while it is being allocated from.
// Ids can be used again after the last release: a new pool of the core's then.
//
// Routing: torch begins and ends it with an id and a filter on streams; the newest filter that is
// true wins. A graph's filter is true for the streams of its capture, use_mem_pool()'s for all streams
// of its thread. The core has to know of captures, and not every torch tells (markCaptureBegin() is
// there from 2.13 on), so a filter that is true for no stream when it comes counts as a capture from
// its begin to its end.
//
// Threads: any. The lock of a device is held while filters run and while the core is called, never
// while a third party's allocator is.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/mutex.hpp"
#include "core/allocator.hpp"
#include "runtime/registry.hpp"

namespace gpumemx::adapter {

class PrivatePools {
 public:
  using Filter = std::function<bool(cudaStream_t)>;
  using ThirdParty = std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator>;

  // `simulated`: on simulated devices torch has no streams, and CUDA is not asked.
  explicit PrivatePools(bool simulated) : is_simulated_(simulated) {}

  // The pool that one allocation goes to; keeps it while it lives.
  class Use {
   public:
    Use() = default;
    Use(DeviceAllocator& core, PoolId pool, bool in_capture)
        : core_(&core), pool_(pool), in_capture_(in_capture) {
      core.retain_pool(pool);
    }
    ~Use() {
      if (core_ != nullptr) core_->release_pool(pool_);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    PoolId pool() const { return pool_; }
    bool in_capture() const { return in_capture_; }

   private:
    DeviceAllocator* core_ = nullptr;
    PoolId pool_ = kDefaultPool;
    bool in_capture_ = false;
  };

  // The hot path: whether route() has anything to say.
  bool is_routing(c10::DeviceIndex device) const {
    return on(device).routes_open.load(std::memory_order_relaxed) != 0;
  }
  Use route(DeviceAllocator& core, c10::DeviceIndex device, cudaStream_t stream);
  // What a third party's allocator has thrown in this thread's last allocation, if anything.
  static std::exception_ptr take_thrown();

  // All that follow raise torch's errors for what the caller did wrong.
  void begin(DeviceAllocator& core, c10::DeviceIndex device, c10::MempoolId_t id, Filter filter);
  void end(DeviceAllocator& core, c10::DeviceIndex device, c10::MempoolId_t id);
  void mark_capture(DeviceAllocator& core, c10::DeviceIndex device, bool begins);

  void create_or_retain(DeviceAllocator& core, c10::DeviceIndex device, c10::MempoolId_t id,
                        ThirdParty allocator);
  void release(DeviceAllocator& core, c10::DeviceIndex device, c10::MempoolId_t id);
  // Whether this release would be the last one of a pool that graphs were captured to.
  bool ends_graphs(c10::DeviceIndex device, c10::MempoolId_t id) const;
  int users(c10::DeviceIndex device, c10::MempoolId_t id) const;

  // Whether a graph was captured in it. False for a pool that is not there.
  bool has_graphs(c10::DeviceIndex device, c10::MempoolId_t id) const;
  // The core's pool of that id, in use or released; nothing when it is not known there.
  std::optional<PoolId> find(c10::DeviceIndex device, c10::MempoolId_t id) const;
  PoolId in_use(c10::DeviceIndex device, c10::MempoolId_t id) const;  // raises where there is none

 private:
  struct Pool {
    PoolId core{};
    int users = 0;            // 0: released, and perhaps still there
    bool has_graphs = false;  // something was captured to it
  };
  struct Route {
    c10::MempoolId_t id;
    Filter filter;
    std::thread::id thread;
    bool is_capture = false;
    bool has_started = false;            // the capture was seen going on
    bool is_over = false;                // ended without end(), as when CUDA called it invalid
    std::optional<cudaStream_t> stream;  // the capture's first, where it surely still exists
  };
  struct OnDevice {
    std::atomic<int> routes_open{0};
    mutable Mutex mu;
    std::map<c10::MempoolId_t, Pool> pools GPUMEMX_GUARDED_BY(mu);
    std::vector<Route> routes GPUMEMX_GUARDED_BY(mu);
    int marked_captures GPUMEMX_GUARDED_BY(mu) = 0;
    std::size_t pruned_at GPUMEMX_GUARDED_BY(mu) = 64;
  };

  OnDevice& on(c10::DeviceIndex device) { return devices_[static_cast<std::size_t>(device)]; }
  const OnDevice& on(c10::DeviceIndex device) const {
    return devices_[static_cast<std::size_t>(device)];
  }
  // REQUIRES: the device's lock is held. Names a new pool to PoolNames.
  Pool& retain(c10::DeviceIndex device, DeviceAllocator& core, c10::MempoolId_t id,
               ThirdParty allocator);
  void close_dead_captures(OnDevice& here, DeviceAllocator& core) GPUMEMX_REQUIRES(here.mu);
  static bool captures_are_open(const OnDevice& here) GPUMEMX_REQUIRES(here.mu);
  bool may_capture(cudaStream_t stream) const;
  bool is_of_a_capture(const Filter& filter, c10::DeviceIndex device) const;
  std::optional<c10::cuda::CUDAStream> current_stream(c10::DeviceIndex device) const;

  const bool is_simulated_;

  std::array<OnDevice, DeviceRegistry::kMaxDevices> devices_;
};

}  // namespace gpumemx::adapter
