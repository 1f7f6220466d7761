// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/private_pools.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "adapter/pool_names.hpp"

namespace gpumemx::adapter {

namespace {

thread_local std::exception_ptr thrown;
thread_local bool inside_third_party = false;

// A third party's allocator as the source of a pool's segments. It is called as torch's own allocator
// calls it: raw_alloc() on the current device and stream for whole segments, raw_delete() for each.
class ThirdPartySource final : public SegmentSource {
 public:
  explicit ThirdPartySource(PrivatePools::ThirdParty allocator)
      : allocator_(std::move(allocator)) {}

  Result<DeviceAddr> allocate(Bytes size) override {
    const bool before = std::exchange(inside_third_party, true);
    void* ptr = nullptr;
    Errc code = Errc::kOutOfMemory;
    try {
      ptr = allocator_->raw_alloc(size.n);
    } catch (const c10::OutOfMemoryError&) {
      thrown = std::current_exception();
    } catch (...) {  // the core knows no exceptions: it fails, and the caller gets this one
      thrown = std::current_exception();
      code = Errc::kDriverFailure;
    }
    inside_third_party = before;
    if (ptr != nullptr) return DeviceAddr{reinterpret_cast<std::uintptr_t>(ptr)};
    return Error{code, size, "the pool's own allocator gave no memory"};
  }

  void free(DeviceAddr address) override {
    const bool before = std::exchange(inside_third_party, true);
    try {
      allocator_->raw_delete(reinterpret_cast<void*>(address.n));  // NOLINT: device memory
    } catch (const std::exception& error) {
      TORCH_WARN("gpumemx: the allocator of a memory pool failed to free its memory: ",
                 error.what());
    }
    inside_third_party = before;
  }

 private:
  const PrivatePools::ThirdParty allocator_;
};

std::string text_of(c10::MempoolId_t id) {
  return "(" + std::to_string(id.first) + ", " + std::to_string(id.second) + ")";
}

}  // namespace

std::exception_ptr PrivatePools::take_thrown() { return std::exchange(thrown, nullptr); }

// False only when it surely does not: then a graph's filter need not be asked (and is not, so that a
// graph that failed and is gone is not either).
bool PrivatePools::may_capture(cudaStream_t stream) const {
  if (is_simulated_) return true;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  (void)cudaGetLastError();
  // Implicit: the legacy stream, while another captures that it would wait for.
  return error != cudaErrorStreamCaptureImplicit;
}

std::optional<c10::cuda::CUDAStream> PrivatePools::current_stream(c10::DeviceIndex device) const {
  if (is_simulated_) return std::nullopt;
  return c10::cuda::getCurrentCUDAStream(device);
}

// Before a graph's capture begins, no stream is of it. Other filters are true for all streams of a
// thread, or for the current one.
bool PrivatePools::is_of_a_capture(const Filter& filter, c10::DeviceIndex device) const {
  try {
    if (filter(cudaStreamPerThread)) return false;
    const auto current = current_stream(device);
    return !current || !filter(current->stream());
  } catch (const std::exception&) {
    return true;  // asked in a capture of somebody else's
  }
}

PrivatePools::Use PrivatePools::route(DeviceAllocator& core, c10::DeviceIndex device,
                                      cudaStream_t stream) {
  thrown = nullptr;
  // What a third party allocates for itself does not come from the pool that asks it.
  if (inside_third_party) return {};
  OnDevice& here = on(device);
  MutexLock lock(here.mu);
  std::optional<bool> capturing;  // asked once, and only if there is a capture
  for (auto route = here.routes.rbegin(); route != here.routes.rend(); ++route) {
    if (route->is_over) continue;
    if (route->is_capture) {
      if (!capturing) capturing = may_capture(stream);
      if (!*capturing) continue;
    }
    if (!route->filter(stream)) continue;
    route->has_started = true;
    const auto pool = here.pools.find(route->id);
    const bool is_there = pool != here.pools.end() && pool->second.users > 0;
    if (!is_there) continue;  // released before its end(): others can't be kept out of it any more
    // Also a pool that use_mem_pool() routes to in the middle of a capture.
    pool->second.has_graphs = pool->second.has_graphs || captures_are_open(here);
    return {core, pool->second.core, route->is_capture};
  }
  if (capturing && !*capturing) close_dead_captures(here, core);
  return {};
}

bool PrivatePools::captures_are_open(const OnDevice& here) {
  return std::any_of(here.routes.begin(), here.routes.end(),
                     [](const Route& route) { return route.is_capture && !route.is_over; });
}

// A capture that CUDA calls invalid ends without end() in torch 2.11. While it counts as going on,
// nothing is waited for.
void PrivatePools::close_dead_captures(OnDevice& here, DeviceAllocator& core) {
  for (Route& route : here.routes) {
    if (!route.is_capture || route.is_over || !route.stream) continue;
    // Between begin() and CUDA's begin there is nothing but the thread that does both.
    if (!route.has_started && route.thread != std::this_thread::get_id()) continue;
    if (may_capture(*route.stream)) continue;
    route.is_over = true;
    core.end_capture();
  }
}

void PrivatePools::begin(DeviceAllocator& core, c10::DeviceIndex device, c10::MempoolId_t id,
                         Filter filter) {
  const bool is_capture = is_of_a_capture(filter, device);
  OnDevice& here = on(device);
  MutexLock lock(here.mu);
  close_dead_captures(here, core);
  const auto same = std::find_if(here.routes.begin(), here.routes.end(),
                                 [&](const Route& route) { return route.id == id; });
  if (same != here.routes.end()) {
    TORCH_CHECK(same->is_over, "beginAllocateToPool: already recording to mempool_id ",
                text_of(id));
    here.routes.erase(same);
  }
  Pool& pool = retain(device, core, id, nullptr);
  pool.has_graphs = pool.has_graphs || is_capture;
  Route route;
  route.id = id;
  route.filter = std::move(filter);
  route.thread = std::this_thread::get_id();
  if (is_capture) {
    route.is_capture = true;
    const auto stream = current_stream(device);
    // torch's own are there for ever: the default one, and those of its pools, whose ids are odd.
    const bool stays = stream && (stream->id() == 0 || (stream->id() & 1) != 0);
    if (stays) route.stream = stream->stream();
    core.begin_capture();
  }
  here.routes.push_back(std::move(route));
  here.routes_open = static_cast<int>(here.routes.size());
}

void PrivatePools::end(DeviceAllocator& core, c10::DeviceIndex device, c10::MempoolId_t id) {
  OnDevice& here = on(device);
  MutexLock lock(here.mu);
  const auto route = std::find_if(here.routes.begin(), here.routes.end(),
                                  [&](const Route& r) { return r.id == id; });
  TORCH_CHECK(route != here.routes.end(),
              "endAllocateToPool: not currently recording to mempool_id ", text_of(id));
  const bool ends_capture = route->is_capture && !route->is_over;
  here.routes.erase(route);
  here.routes_open = static_cast<int>(here.routes.size());
  if (ends_capture) core.end_capture();
}

void PrivatePools::mark_capture(DeviceAllocator& core, c10::DeviceIndex device, bool begins) {
  OnDevice& here = on(device);
  MutexLock lock(here.mu);
  if (begins) {
    ++here.marked_captures;
    core.begin_capture();
  } else if (here.marked_captures > 0) {
    --here.marked_captures;
    core.end_capture();
  }
}

PrivatePools::Pool& PrivatePools::retain(c10::DeviceIndex device, DeviceAllocator& core,
                                         c10::MempoolId_t id, ThirdParty allocator) {
  OnDevice& here = on(device);
  here.mu.assert_held();
  TORCH_CHECK(id != c10::MempoolId_t(0, 0), "gpumemx: (0, 0) is no private memory pool");
  if (here.pools.size() > here.pruned_at) {
    std::erase_if(here.pools, [&](const auto& entry) {
      return entry.second.users == 0 && !core.pool_info(entry.second.core);
    });
    here.pruned_at = 2 * here.pools.size() + 64;
  }
  Pool& pool = here.pools[id];
  if (pool.users == 0) {
    PoolOptions options;
    if (allocator != nullptr) {
      options.source = std::make_shared<ThirdPartySource>(std::move(allocator));
    }
    pool = {core.create_pool(std::move(options)), 0, false};
    PoolNames::instance().set(device, pool.core, id);
  } else {
    TORCH_CHECK(allocator == nullptr, "the memory pool ", text_of(id),
                " exists already: its allocator can't be changed");
  }
  ++pool.users;
  return pool;
}

void PrivatePools::create_or_retain(DeviceAllocator& core, c10::DeviceIndex device,
                                    c10::MempoolId_t id, ThirdParty allocator) {
  OnDevice& here = on(device);
  MutexLock lock(here.mu);
  (void)retain(device, core, id, std::move(allocator));
}

void PrivatePools::release(DeviceAllocator& core, c10::DeviceIndex device, c10::MempoolId_t id) {
  OnDevice& here = on(device);
  MutexLock lock(here.mu);
  const auto found = here.pools.find(id);
  TORCH_CHECK(found != here.pools.end() && found->second.users > 0,
              "releasePool: there is no memory pool ", text_of(id), " in use on device ",
              static_cast<int>(device));
  if (--found->second.users == 0) core.release_pool(found->second.core);
}

bool PrivatePools::ends_graphs(c10::DeviceIndex device, c10::MempoolId_t id) const {
  const OnDevice& here = on(device);
  MutexLock lock(here.mu);
  const auto found = here.pools.find(id);
  return found != here.pools.end() && found->second.users == 1 && found->second.has_graphs;
}

bool PrivatePools::has_graphs(c10::DeviceIndex device, c10::MempoolId_t id) const {
  const OnDevice& here = on(device);
  MutexLock lock(here.mu);
  const auto found = here.pools.find(id);
  return found != here.pools.end() && found->second.has_graphs;
}

int PrivatePools::users(c10::DeviceIndex device, c10::MempoolId_t id) const {
  const OnDevice& here = on(device);
  MutexLock lock(here.mu);
  const auto found = here.pools.find(id);
  TORCH_CHECK(found != here.pools.end(), "there is no memory pool ", text_of(id), " on device ",
              static_cast<int>(device));
  return found->second.users;
}

std::optional<PoolId> PrivatePools::find(c10::DeviceIndex device, c10::MempoolId_t id) const {
  const OnDevice& here = on(device);
  MutexLock lock(here.mu);
  const auto found = here.pools.find(id);
  if (found == here.pools.end()) return std::nullopt;
  return found->second.core;
}

PoolId PrivatePools::in_use(c10::DeviceIndex device, c10::MempoolId_t id) const {
  const OnDevice& here = on(device);
  MutexLock lock(here.mu);
  const auto found = here.pools.find(id);
  TORCH_CHECK(found != here.pools.end() && found->second.users > 0, "the memory pool ", text_of(id),
              " is not in use on device ", static_cast<int>(device));
  return found->second.core;
}

}  // namespace gpumemx::adapter
