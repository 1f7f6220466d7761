// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/torch/simulated_pools.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <pybind11/stl.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "adapter/install.hpp"
#include "driver/sim/sim_driver.hpp"
#include "runtime/registry.hpp"

namespace py = pybind11;

namespace gpumemx::bindings {

namespace {

using PoolKey = std::pair<std::uint64_t, std::uint64_t>;

SimDriver& driver_of(int device) {
  // The registry's allocator is opened by the first use; these devices are simulated ones only.
  return static_cast<SimDriver&>(*DeviceRegistry::instance().device(device).value()->driver);
}

StreamInfo stream_of(int device, std::uint64_t native) {
  return {driver_of(device).stream_with(native), /*permanent=*/true};
}

adapter::TorchAllocator& torch_allocator() { return *adapter::installed(); }
c10::DeviceIndex index(int device) { return static_cast<c10::DeviceIndex>(device); }
c10::MempoolId_t id_of(PoolKey pool) { return {pool.first, pool.second}; }

// A third party's allocator over the simulated device. What it is asked for and given back is
// written down.
class ThirdParty final : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
 public:
  explicit ThirdParty(int device)
      : CUDAPluggableAllocator([](std::size_t, int, cudaStream_t) -> void* { return nullptr; },
                               [](void*, std::size_t, int, cudaStream_t) {}),
        device_(device) {}

  void* raw_alloc(std::size_t nbytes) override {
    TORCH_CHECK(!raises, "the third party raises");
    if (refuses) return nullptr;
    const auto got = driver_of(device_).allocate({nbytes});
    if (!got.ok()) return nullptr;
    asked.push_back(nbytes);
    return reinterpret_cast<void*>(got.value().n);  // NOLINT: device memory
  }
  void raw_delete(void* ptr) override {
    const DeviceAddr address{reinterpret_cast<std::uintptr_t>(ptr)};
    TORCH_CHECK(driver_of(device_).free(address).ok(), "not memory of this third party");
    ++freed;
  }

  std::vector<std::size_t> asked;
  int freed = 0;
  bool refuses = false;
  bool raises = false;

 private:
  const int device_;
};

}  // namespace

void bind_simulated_pools(py::module_& m) {
  py::class_<ThirdParty, std::shared_ptr<ThirdParty>>(m, "_SimThirdParty")
      .def(py::init<int>(), py::arg("device") = 0)
      .def_readonly("asked", &ThirdParty::asked)
      .def_readonly("freed", &ThirdParty::freed)
      .def_readwrite("refuses", &ThirdParty::refuses)
      .def_readwrite("raises", &ThirdParty::raises);

  m.def("_sim_create_pool", [](int device, PoolKey pool, std::shared_ptr<ThirdParty> allocator) {
    torch_allocator().createOrIncrefPool(index(device), id_of(pool), std::move(allocator));
  });
  m.def("_sim_pool_use_count", [](int device, PoolKey pool) {
    return torch_allocator().getPoolUseCount(index(device), id_of(pool));
  });
  m.def("_sim_set_use_on_oom", [](int device, PoolKey pool, bool use) {
    torch_allocator().setUseOnOOM(index(device), id_of(pool), use);
  });
  m.def("_sim_set_no_split",
        [](int device, PoolKey pool) { torch_allocator().setNoSplit(index(device), id_of(pool)); });
  m.def("_sim_empty_cache", [](PoolKey pool) { torch_allocator().emptyCache(id_of(pool)); });

  m.def("_sim_new_stream", [](int device) { return driver_of(device).new_stream().native; });
  m.def("_sim_alloc_on", [](int device, std::size_t nbytes, std::uint64_t native) {
    const StreamInfo stream = stream_of(device, native);
    const py::gil_scoped_release release;
    return reinterpret_cast<std::uintptr_t>(
        torch_allocator().allocate_on(index(device), nbytes, stream));
  });
  m.def("_sim_record_stream", [](int device, std::uintptr_t address, std::uint64_t native) {
    return DeviceRegistry::instance().if_open(device)->allocator->record_stream(
        {address}, stream_of(device, native));
  });
  // Work that is queued and does not end by itself any more; and memory that somebody else takes.
  m.def("_sim_stop_work", [](int device) { driver_of(device).set_manual(true); });
  m.def("_sim_launch", [](int device, std::uint64_t native) {
    driver_of(device).launch(stream_of(device, native).ref, {});
  });
  m.def("_sim_take", [](int device, std::size_t nbytes) {
    TORCH_CHECK(driver_of(device).allocate({nbytes}).ok(), "the device has not that much");
  });
  // As CUDAGraph does it: the pool first, with a filter that is true for the capture's streams once
  // the capture goes on; the driver's begin after it, and its end before the pool's.
  m.def("_sim_begin_capture", [](int device, PoolKey pool, std::vector<std::uint64_t> natives) {
    auto capturing = std::make_shared<bool>(false);
    torch_allocator().beginAllocateToPool(
        index(device), id_of(pool), [capturing, natives](cudaStream_t stream) {
          const auto native = reinterpret_cast<std::uintptr_t>(stream);
          return *capturing && std::find(natives.begin(), natives.end(), native) != natives.end();
        });
    for (const std::uint64_t native : natives) {
      driver_of(device).begin_capture(stream_of(device, native).ref, CaptureMode::kGlobal);
    }
    *capturing = true;
  });
  m.def("_sim_end_capture", [](int device, PoolKey pool, std::vector<std::uint64_t> natives) {
    bool valid = true;
    for (const std::uint64_t native : natives) {
      valid = driver_of(device).end_capture(stream_of(device, native).ref).ok() && valid;
    }
    torch_allocator().endAllocateToPool(index(device), id_of(pool));
    return valid;
  });
  m.def("_sim_mark_capture", [](int device, bool begins) {
    if (begins) {
      torch_allocator().markCaptureBegin(index(device));
    } else {
      torch_allocator().markCaptureEnd(index(device));
    }
  });
}

}  // namespace gpumemx::bindings
