// SPDX-License-Identifier: BSD-3-Clause
#include "runtime/pressure.hpp"

#include <algorithm>
#include <cstdio>
#include <exception>

namespace gpumemx {

namespace {

// A function that allocates without success must not be asked to make room for itself.
constinit thread_local bool is_asking = false;

bool call(const PressureCallbacks::Function& function, int device, const PressureInfo& info) {
  try {
    return function(device, info);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpumemx: a callback of on_memory_pressure() failed: %s\n", error.what());
  } catch (...) {
    std::fputs("gpumemx: a callback of on_memory_pressure() failed\n", stderr);
  }
  return false;
}

}  // namespace

std::shared_ptr<PressureCallbacks::Entry> PressureCallbacks::add(Function function) {
  auto entry = std::make_shared<Entry>(std::move(function));
  MutexLock lock(mu_);
  entries_.push_back(entry);
  return entry;
}

void PressureCallbacks::add_for_ever(Function function) {
  auto entry = std::make_shared<Entry>(std::move(function));
  entry->is_for_ever_ = true;
  MutexLock lock(mu_);
  entries_.push_back(std::move(entry));
}

void PressureCallbacks::remove(const std::shared_ptr<Entry>& entry) {
  {
    MutexLock lock(mu_);
    std::erase(entries_, entry);
  }
  const std::lock_guard<std::recursive_mutex> lock(entry->running_);
  entry->is_removed_ = true;
}

bool PressureCallbacks::ask(int device, const PressureInfo& info) {
  if (is_asking) return false;
  std::vector<std::shared_ptr<Entry>> entries;
  {
    MutexLock lock(mu_);
    entries = entries_;
  }
  is_asking = true;
  bool freed = false;
  for (const auto& entry : entries) {
    std::unique_lock<std::recursive_mutex> lock(entry->running_, std::defer_lock);
    if (!entry->is_for_ever_) lock.lock();
    if (!entry->is_removed_) freed = call(entry->function_, device, info) || freed;
  }
  is_asking = false;
  return freed;
}

}  // namespace gpumemx
