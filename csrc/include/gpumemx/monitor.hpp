// SPDX-License-Identifier: BSD-3-Clause
//
// What a part of a program does to a device's memory.
#pragma once

#include <cstdint>
#include <functional>
#include <gpumemx/export.hpp>
#include <gpumemx/memory.hpp>
#include <memory>
#include <string>

namespace gpumemx {

class GPUMonitor;

/// What a finished monitor is handed to.
using ReportFunction = std::function<void(const GPUMonitor&)>;

/// Measures from its construction to its end, which is end() or its destruction.
///
/// @code
/// {
///   gpumemx::GPUMonitor forward("forward", gpumemx::print_report);
///   output = model->forward(input);
/// }  // forward: peak 3.20 GiB, kept +1.10 GiB, 12 driver calls in 0.4 ms
/// @endcode
///
/// Monitors nest and overlap, also across threads: each has its own peak and leaves those of others and
/// torch's alone. What all threads do on the device counts. While it runs the figures are those so far,
/// afterwards those of the whole. Sizes are bytes of live tensors, each rounded up to 512.
///
/// Beginning and ending one takes less than a microsecond, calls no driver and waits for nothing.
/// Starts no CUDA; before it has started all figures are 0. One thread at a time may use a monitor. One
/// that was moved from has all figures 0.
class GPUMEMX_API GPUMonitor {
 public:
  /// @param name shown in reports.
  /// @param on_end called once, when it ends; nothing is printed otherwise. What it throws is written to
  ///   stderr.
  /// @param device its index.
  /// @throws std::out_of_range CUDA has started and has no such device.
  explicit GPUMonitor(std::string name, ReportFunction on_end = nullptr,
                      int device = kCurrentDevice);
  /// The same without a report.
  GPUMonitor(std::string name, int device);
  /// Ends it.
  ~GPUMonitor();
  /// Goes on with what the other measures.
  GPUMonitor(GPUMonitor&& other) noexcept;
  /// The same, and ends this one first.
  GPUMonitor& operator=(GPUMonitor&& other) noexcept;
  GPUMonitor(const GPUMonitor&) = delete;
  GPUMonitor& operator=(const GPUMonitor&) = delete;

  /// Stops measuring and reports. Later calls do nothing.
  void end();

  const std::string& name() const;  ///< As it was given.
  int device() const;               ///< Index of the device that is measured.
  std::uint64_t before() const;     ///< Allocated when it began.
  std::uint64_t after() const;      ///< Allocated when it ended; until then, now.
  std::int64_t delta() const;       ///< after() - before(): what was kept or, below 0, freed.
  /// The most that was allocated meanwhile. Exact while one thread at a time allocates on the device;
  /// else at most the sum of what each stream had at its highest.
  std::uint64_t peak() const;
  std::uint64_t allocations() const;  ///< How many blocks were allocated.
  /// Calls to the driver that move memory: create, map, unmap, release, allocate, free.
  std::uint64_t driver_calls() const;
  double driver_seconds() const;  ///< Seconds in the driver; 0 with torch's own allocator.
  /// Whether gpumemx was measured; else report() says what is missing.
  bool exact() const;
  /// The figures in a line, and in a second one what they leave out, if anything.
  std::string report() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// For GPUMonitor: writes the report to stderr as one line.
GPUMEMX_API void print_report(const GPUMonitor& monitor);

}  // namespace gpumemx
