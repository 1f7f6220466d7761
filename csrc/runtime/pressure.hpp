// SPDX-License-Identifier: BSD-3-Clause
//
// Functions of the program that are asked to free memory when a request cannot be served, before it
// fails. They hang on the process, not on a device: a server that drops a model frees memory of all.
//
// Threads: any. A function runs on the thread whose request cannot be served, with no lock of the
// allocator held, so it may free and allocate; what it allocates itself asks nobody again.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "core/observer.hpp"

namespace gpumemx {

class PressureCallbacks {
 public:
  // True: something was freed, the request is worth another try. What it throws is written to stderr
  // and counts as false: the request that waits is somebody else's.
  using Function = std::function<bool(int device, const PressureInfo& info)>;

  PressureCallbacks() = default;
  PressureCallbacks(const PressureCallbacks&) = delete;
  PressureCallbacks& operator=(const PressureCallbacks&) = delete;

  // One function that is registered. Shared by who registered it and by who is calling it.
  class Entry {
   public:
    explicit Entry(Function function) : function_(std::move(function)) {}

   private:
    friend class PressureCallbacks;
    Function function_;
    // Recursive: a function may end its own registration. Held while it runs, so that remove() returns
    // when it runs no more.
    std::recursive_mutex running_;
    bool is_removed_ = false;
    bool is_for_ever_ = false;
  };

  // Asked in the order in which they were added. REQUIRES: function is not empty.
  std::shared_ptr<Entry> add(Function function) GPUMEMX_EXCLUDES(mu_);
  // Waits while another thread runs it: afterwards what it refers to may be destroyed.
  void remove(const std::shared_ptr<Entry>& entry) GPUMEMX_EXCLUDES(mu_);

  // The same for ever. Nothing is held while it runs, in several threads at once if need be: for
  // functions that take a lock which their caller may have, as Python's.
  void add_for_ever(Function function) GPUMEMX_EXCLUDES(mu_);

  // Asks all of them; true when one has freed something.
  bool ask(int device, const PressureInfo& info) GPUMEMX_EXCLUDES(mu_);

 private:
  Mutex mu_;  // a leaf: not held while a function runs
  std::vector<std::shared_ptr<Entry>> entries_ GPUMEMX_GUARDED_BY(mu_);
};

// What one device's allocator tells, with the device's number.
class PressureTeller final : public Observer {
 public:
  PressureTeller(PressureCallbacks& callbacks, int device)
      : callbacks_(callbacks), device_(device) {}
  bool on_pressure(const PressureInfo& info) override { return callbacks_.ask(device_, info); }

 private:
  PressureCallbacks& callbacks_;
  const int device_;
};

}  // namespace gpumemx
