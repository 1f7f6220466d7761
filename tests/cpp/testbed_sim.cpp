// SPDX-License-Identifier: BSD-3-Clause
//
// The C++ interface on a simulated device of 4 GiB: torch's own current stream needs a real one, so
// memory is asked for on a stream that is named here.
#include <stdexcept>

#include "adapter/install.hpp"
#include "cpp/testbed.hpp"
#include "driver/sim/sim_driver.hpp"

namespace gpumemx::testbed {

void install(const Settings& settings) {
  if (is_installed()) return;
  adapter::InstallRequest request;
  std::vector<ConfPair> pairs;
  for (const auto& [key, value] : settings.values) pairs.push_back({key, value.text()});
  if (auto wrong = request.settings.set_all(pairs, SettingSet::kArgumentSource)) {
    throw std::runtime_error(*wrong);
  }
  request.simulated_devices = 1;
  request.open = [](int device) -> Result<std::unique_ptr<DeviceDriver>> {
    SimOptions options;
    options.capacity = 4_GiB;
    options.check_hazards = false;  // no kernel runs
    options.device = static_cast<std::uint32_t>(device);
    return std::unique_ptr<DeviceDriver>(std::make_unique<SimDriver>(options));
  };
  if (auto wrong = adapter::install(std::move(request))) throw std::runtime_error(wrong->text);
}

void* allocate(std::uint64_t bytes) {
  return adapter::installed()->allocate_on(0, bytes, {{StreamId{1}, 0}, true});
}
void free(void* memory) { adapter::installed()->raw_delete(memory); }

std::shared_ptr<void> make_tensor(std::uint64_t bytes) { return std::make_shared<Block>(bytes); }

std::uint64_t driver_free() {
  return DeviceRegistry::instance().device(0).value()->driver->memory().value().free.n;
}

}  // namespace gpumemx::testbed
