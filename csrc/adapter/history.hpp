// SPDX-License-Identifier: BSD-3-Clause
//
// torch's memory history: the rings are the cores', one a device; here is what torch attaches to
// them, and their translation into its trace entries.
//
// Stacks are taken by a function that torch hands over. It may take the GIL, so it is called before
// the core is entered (Because), and what it returned is never destroyed inside the core either, where
// the last reference may well go: it is put aside and destroyed by a later call (history.cpp, "Stacks
// that nobody needs any more").
//
// Trackers are called with a device's books locked, at the moment of each event: that is torch's
// contract, and what lets NCCL register a segment after it exists and deregister it before it goes.
//
// Threads: any, at any time. Nothing here is destroyed: entries hold Python objects at exit.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "base/ring_buffer.hpp"
#include "core/history.hpp"
#include "runtime/registry.hpp"

namespace gpumemx::adapter {

namespace torch_alloc = c10::cuda::CUDACachingAllocator;

// The stack behind what a core calls a context; null for none.
std::shared_ptr<c10::GatheredContext> gathered(const ContextRef& context);

class MemoryHistory {
 public:
  explicit MemoryHistory(DeviceRegistry& devices);
  MemoryHistory(const MemoryHistory&) = delete;
  MemoryHistory& operator=(const MemoryHistory&) = delete;

  // Whether anybody wants events. The one branch that an allocation pays otherwise.
  bool watching() const { return watching_.load(std::memory_order_relaxed); }
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  bool has_trackers() const { return trackers_.load(std::memory_order_relaxed) != nullptr; }

  // On all devices, also those that are used later. Without `clear`, what is recorded stays.
  void record(bool enabled, torch_alloc::CreateContextFn recorder, std::size_t max_entries,
              torch_alloc::RecordContext when, bool clear,
              const std::vector<std::string>& skip_actions) GPUMEMX_EXCLUDES(mu_);
  // For ever: trackers can't be detached. Sees every event that begins after this has returned.
  void attach(torch_alloc::AllocatorTraceTracker tracker) GPUMEMX_EXCLUDES(mu_);

  // What the program says about itself: a mark in time, and about what this thread does from now on.
  void add_mark(c10::DeviceIndex device,
                const std::vector<std::pair<std::string, std::string>>& metadata)
      GPUMEMX_EXCLUDES(marks_mu_);
  static void push_compile_context(std::string context);
  static void pop_compile_context();
  static void set_user_metadata(std::string metadata);
  static std::string user_metadata();
  // About the live block at `ptr`. Fails when there is none.
  void annotate(const void* ptr, const std::string& metadata);

  // Where the live block at `ptr` was allocated, or null.
  std::shared_ptr<c10::GatheredContext> context_of(const void* ptr) const;

  // Segments of all pools or, where it is given, of the one that `only_pool` names for each device (or
  // of none); traces and marks always of everything. `registers`: whoever looks may register the
  // segments that are mapped, so trackers are told of each as freed before any of it goes.
  using PoolOf = std::function<std::optional<PoolId>(c10::DeviceIndex device)>;
  void snapshot(const PoolOf& only_pool, bool include_traces, bool registers,
                torch_alloc::SnapshotInfo& out) GPUMEMX_EXCLUDES(marks_mu_, registered_mu_);

 private:
  friend class Because;
  using Trackers = std::vector<torch_alloc::AllocatorTraceTracker>;
  using Mark = c10::CachingDeviceAllocator::AnnotationEntry;

  struct Listener final : HistoryListener {
    void on_event(const HistoryEvent& event) override;
    MemoryHistory* owner = nullptr;
    c10::DeviceIndex device = 0;
  };
  struct Rings {  // as every device's is to be
    std::size_t capacity = 0;
    HistoryRules rules;
  };

  struct Registered {
    Bytes size;
    c10::MempoolId_t pool;
  };

  // Before the memory of `event` goes. Called under the device's lock.
  void withdraw(c10::DeviceIndex device, const HistoryEvent& event, const Trackers& trackers)
      GPUMEMX_EXCLUDES(registered_mu_);
  Cause gather(torch_alloc::RecordContext level) const;
  void apply(int index, Device& device, bool keep) GPUMEMX_EXCLUDES(mu_);
  void apply_to_all(bool keep) GPUMEMX_EXCLUDES(mu_);

  DeviceRegistry& devices_;
  std::atomic<bool> watching_{false};
  std::atomic<bool> recording_{false};
  std::atomic<torch_alloc::CreateContextFn> recorder_{nullptr};
  std::atomic<torch_alloc::RecordContext> when_{torch_alloc::RecordContext::NEVER};
  std::array<Listener, DeviceRegistry::kMaxDevices> listeners_;
  // Replaced as a whole, and the old list is leaked: another device's thread may be in it.
  std::atomic<const Trackers*> trackers_{nullptr};
  c10::ApproximateClockToUnixTimeConverter clock_;

  Mutex mu_;  // after the registry's, before a device's
  Rings rings_ GPUMEMX_GUARDED_BY(mu_);

  Mutex marks_mu_;  // a leaf
  RingBuffer<Mark> marks_ GPUMEMX_GUARDED_BY(marks_mu_);

  Mutex registered_mu_;  // a leaf
  std::array<std::map<DeviceAddr, Registered>, DeviceRegistry::kMaxDevices> registered_
      GPUMEMX_GUARDED_BY(registered_mu_);
};

// What the calling thread asks of the cores until the end of the scope, and why: takes the stack,
// where one is wanted at `level`. REQUIRES: no lock is held.
class Because {
 public:
  Because(const MemoryHistory& history, torch_alloc::RecordContext level) {
    if (C10_UNLIKELY(history.watching())) open_.emplace(history.gather(level));
  }
  ~Because() {
    if (C10_UNLIKELY(open_.has_value())) leave();
  }
  Because(const Because&) = delete;
  Because& operator=(const Because&) = delete;

  // Held until the end of the scope.
  Context* context() const { return open_ ? open_->cause.context.get() : nullptr; }
  // What a tracker threw meanwhile, or null. Asked for, it is the caller's to rethrow; otherwise it
  // is written to the log.
  std::exception_ptr take_failure() const { return C10_LIKELY(!open_) ? nullptr : take(); }

 private:
  friend class MemoryHistory;
  struct Open {
    explicit Open(Cause why) : cause(std::move(why)), scope(cause) {}
    const Cause cause;
    const CauseScope scope;
  };

  explicit Because(Cause cause) { open_.emplace(std::move(cause)); }
  static std::exception_ptr take();
  void leave();

  std::optional<Open> open_;
};

}  // namespace gpumemx::adapter
