// SPDX-License-Identifier: BSD-3-Clause
//
// Being asked for memory before a request fails.
#pragma once

#include <cstdint>
#include <functional>
#include <gpumemx/export.hpp>
#include <memory>

namespace gpumemx {

/// A request that cannot be served: nothing that the allocator could do itself is left.
struct MemoryPressure {
  int device = 0;                 ///< Index of the device.
  std::uint64_t requested = 0;    ///< Bytes that are asked for.
  std::uint64_t device_free = 0;  ///< Bytes that the driver has free; 0 when it could not be asked.
  std::uint64_t cached = 0;       ///< Unused bytes of the allocator that did not help.
};

/// A function that is registered, until this is destroyed. Movable; an empty one does nothing.
class GPUMEMX_API PressureRegistration {
 public:
  /// Empty.
  PressureRegistration() noexcept;
  /// Waits while another thread is in the function; afterwards what it refers to may go. The function
  /// itself may end its registration. Hold no lock here that the function waits for.
  ~PressureRegistration();
  /// Takes over what the other registered.
  PressureRegistration(PressureRegistration&& other) noexcept;
  /// The same, and ends what was registered here first.
  PressureRegistration& operator=(PressureRegistration&& other) noexcept;
  PressureRegistration(const PressureRegistration&) = delete;
  PressureRegistration& operator=(const PressureRegistration&) = delete;

 private:
  friend GPUMEMX_API PressureRegistration
  on_memory_pressure(std::function<bool(const MemoryPressure&)> callback);
  struct State;
  explicit PressureRegistration(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

/// Registers a function that frees memory when a request cannot be served, before it fails with
/// c10::OutOfMemoryError. It returns whether it freed something: then the request is tried again, once.
///
/// @code
/// auto registration = gpumemx::on_memory_pressure([&](const gpumemx::MemoryPressure& pressure) {
///   return models.unload_oldest(pressure.requested);
/// });
/// @endcode
///
/// It runs on the thread whose request waits, with no lock of the allocator held: it may free tensors,
/// allocate and call every function of this library. What it allocates itself asks nobody again. All
/// registered functions are asked, in the order of their registration; what one throws is written to
/// stderr and counts as false. Only gpumemx asks: with torch's own allocator nobody calls it.
///
/// @throws std::invalid_argument the callback is empty.
[[nodiscard]] GPUMEMX_API PressureRegistration
on_memory_pressure(std::function<bool(const MemoryPressure&)> callback);

}  // namespace gpumemx
