// SPDX-License-Identifier: BSD-3-Clause
#include <gpumemx/pressure.hpp>
#include <stdexcept>
#include <utility>

#include "runtime/registry.hpp"

namespace gpumemx {

struct PressureRegistration::State {
  explicit State(PressureCallbacks::Function function)
      : entry(DeviceRegistry::instance().pressure().add(std::move(function))) {}
  ~State() { DeviceRegistry::instance().pressure().remove(entry); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  std::shared_ptr<PressureCallbacks::Entry> entry;
};

PressureRegistration::PressureRegistration() noexcept = default;
PressureRegistration::PressureRegistration(std::unique_ptr<State> state) noexcept
    : state_(std::move(state)) {}
PressureRegistration::~PressureRegistration() = default;
PressureRegistration::PressureRegistration(PressureRegistration&& other) noexcept = default;
PressureRegistration& PressureRegistration::operator=(PressureRegistration&& other) noexcept =
    default;

PressureRegistration on_memory_pressure(std::function<bool(const MemoryPressure&)> callback) {
  if (!callback) throw std::invalid_argument("on_memory_pressure(): the callback is empty");
  return PressureRegistration(std::make_unique<PressureRegistration::State>(
      [callback = std::move(callback)](int device, const PressureInfo& info) {
        return callback({device, info.requested.n, info.device_free.n, info.cached.n});
      }));
}

}  // namespace gpumemx
