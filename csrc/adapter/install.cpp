// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/install.hpp"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <typeinfo>

#include "adapter/loaded_torch.hpp"
#include "driver/cuda/cuda_driver.hpp"

namespace gpumemx::adapter {

namespace {

using torch_alloc::CUDAAllocatorConfig;
using TorchConfig = c10::CachingAllocator::AcceleratorAllocatorConfig;

std::atomic<TorchAllocator*> the_installed{nullptr};

struct Shown {
  Mutex mu;
  SettingSet settings GPUMEMX_GUARDED_BY(mu);
  std::string complaint GPUMEMX_GUARDED_BY(mu);
};
Shown& shown() {
  static Shown* s = new Shown;  // leaked: torch's parser hook may call late
  return *s;
}

// torch's parser asks this set whether a key that it does not know is somebody else's.
void accept_our_keys() {
  for (const SettingSet::Key& key : SettingSet::known_keys()) {
    TorchConfig::getMutableKeys().insert(std::string(SettingSet::kTorchPrefix) + key.name);
  }
}

// There is one hook and CUDA's own configuration sits on it, so ours goes around it.
void chain_parser_hook() {
  auto before = TorchConfig::getConfigParserHook();
  TorchConfig::getConfigParserHook() = [before](const std::string& text) {
    if (before) before(text);
    if (TorchAllocator* allocator = installed()) allocator->read_torch_settings();
    Shown& s = shown();
    MutexLock lock(s.mu);
    // Allocators that are open keep the options that they were opened with.
    if (auto wrong = s.settings.apply_torch_conf(text, "setAllocatorSettings()")) {
      s.complaint = *wrong;
    }
  };
}

Result<std::unique_ptr<DeviceDriver>> open_cuda(int device) {
  auto driver = CudaDriver::open(device);
  if (!driver.ok()) return driver.error();
  return std::unique_ptr<DeviceDriver>(std::move(driver).take());
}

// With these NCCL registers all segments that there are when a communicator begins, and each that comes
// as a device allocation. What is mapped would move from under it; torch itself ignores them with its
// expandable segments. They are read once, when the first process group begins.
void ignore_registration_of_everything() {
  for (const char* name : {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
                           "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || value[0] == '\0' || std::strchr("0nNfF", value[0]) != nullptr) continue;
    (void)::setenv(name, "0", /*overwrite=*/1);
    TORCH_WARN("gpumemx: ", name,
               " is ignored, as with torch's expandable segments: memory that moves can't be "
               "registered with NCCL as it comes. Register a torch.cuda.MemPool "
               "(register_mem_pool), or run with GPUMEMX_CONF=mode:plain.");
  }
}

}  // namespace

TorchAllocator* installed() { return the_installed.load(); }

// By name: two copies have two type_infos for one class.
bool is_installed_by_anyone() {
  torch_alloc::CUDAAllocator* current = torch_alloc::allocator.load();
  return current != nullptr &&
         std::strcmp(typeid(*current).name(), typeid(TorchAllocator).name()) == 0;
}

std::string settings_complaint() {
  Shown& s = shown();
  MutexLock lock(s.mu);
  return s.complaint;
}

std::vector<SettingSet::Entry> settings_in_force() {
  Shown& s = shown();
  MutexLock lock(s.mu);
  return s.settings.list();
}

std::optional<InstallFailure> install(InstallRequest request) {
  using Failure = InstallFailure;
  if (installed() != nullptr) return std::nullopt;
  torch_alloc::CUDAAllocator* before = torch_alloc::allocator.load();
  if (before == nullptr) return Failure{Failure::kImpossible, "this torch was built without CUDA"};
  if (auto other = other_torch()) return Failure{Failure::kImpossible, *other};
  if (is_installed_by_anyone()) {
    return Failure{Failure::kImpossible,
                   "another copy of gpumemx is torch's allocator in this process already: the "
                   "Python package and the C++ library cannot both be it"};
  }
  if (before->name() != "native") {
    return Failure{
        Failure::kImpossible,
        "torch runs on its '" + before->name() + "' allocator; remove backend:" + before->name() +
            " from PYTORCH_ALLOC_CONF (and PYTORCH_CUDA_ALLOC_CONF), or don't install gpumemx"};
  }
  const bool started = before->initialized();
  if (started && !request.late) return Failure{Failure::kTooLate, "CUDA has started already"};

  // GPUMEMX_CONF and the arguments win over torch's variables.
  SettingSet settings;
  if (auto wrong = settings.apply_torch_environment()) return Failure{Failure::kSetting, *wrong};
  if (auto wrong = settings.overlay(request.settings)) return Failure{Failure::kSetting, *wrong};
  accept_our_keys();
  double fraction = 1;
  try {
    fraction = CUDAAllocatorConfig::per_process_memory_fraction();  // parses torch's variables
  } catch (const std::exception& error) {
    return Failure{Failure::kImpossible,
                   std::string("torch refuses its own configuration: ") + error.what()};
  }
  chain_parser_hook();
  if (!settings.core().plain) ignore_registration_of_everything();

  DeviceRegistry& devices = DeviceRegistry::instance();
  auto* allocator =
      new TorchAllocator(devices, started ? before : nullptr, request.simulated_devices > 0);
  devices.configure(settings.core(), request.open ? std::move(request.open) : open_cuda, allocator);
  if (fraction < 1) {
    for (int i = 0; i < DeviceRegistry::kMaxDevices; ++i) devices.set_fraction(i, fraction);
  }
  {
    Shown& s = shown();
    MutexLock lock(s.mu);
    s.settings = std::move(settings);
  }

  // c10::GetAllocator() is what torch.accelerator uses, CUDACachingAllocator::get() all the rest.
  // From torch 2.12 on a priority below that of torch's own registration changes nothing, silently.
  c10::SetAllocator(c10::kCUDA, allocator, 255);
  if (started) {
    torch_alloc::allocator.store(allocator);
  } else {
    // Leaked on purpose: torch keeps the pointer, and frees through it, until the process is gone.
    torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(
        std::shared_ptr<torch_alloc::CUDAAllocator>(allocator, [](auto*) {}));
  }
  if (request.simulated_devices > 0) {
    allocator->init(request.simulated_devices);
  } else if (started) {
    allocator->init(c10::cuda::device_count());
  }
  the_installed = allocator;
  return std::nullopt;
}

}  // namespace gpumemx::adapter
