// SPDX-License-Identifier: BSD-3-Clause
//
// Where in the program something happened: opaque to the core, which keeps it with blocks, handles and
// events. References are counted in the object itself, since every event takes one: a count elsewhere
// would be a second allocation, and a line more to fetch when an old event is overwritten.
//
// The last reference mostly goes with the books locked, and what a context stands for may not be destroyed
// there. So its end is up to its maker: unreferenced().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace gpumemx {

class Context {
 public:
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 protected:
  ~Context() = default;  // its maker's to call

 private:
  friend class ContextRef;
  // Nobody refers to it any more, and nobody will. Called by whoever held the last reference, under
  // whichever locks: must not wait for anybody who may be inside the allocator.
  virtual void unreferenced() noexcept = 0;

  std::atomic<std::uint64_t> references_{0};
};

// A reference, or null.
class ContextRef {
 public:
  ContextRef() = default;
  ContextRef(std::nullptr_t) {}  // NOLINT(google-explicit-constructor): as of a pointer
  // One more.
  explicit ContextRef(Context* context) : context_(context) {
    if (context_ != nullptr) context_->references_.fetch_add(1, std::memory_order_relaxed);
  }
  ContextRef(const ContextRef& other) : ContextRef(other.context_) {}
  ContextRef(ContextRef&& other) noexcept : context_(std::exchange(other.context_, nullptr)) {}
  ContextRef& operator=(const ContextRef& other) {
    if (context_ != other.context_) ContextRef(other).swap(*this);
    return *this;
  }
  ContextRef& operator=(ContextRef&& other) noexcept {
    ContextRef(std::move(other)).swap(*this);
    return *this;
  }
  ~ContextRef() {
    // Who finds itself the last has seen all that the others did.
    if (context_ != nullptr && context_->references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      context_->unreferenced();
    }
  }

  Context* get() const { return context_; }
  bool operator==(const ContextRef&) const = default;

 private:
  void swap(ContextRef& other) noexcept { std::swap(context_, other.context_); }

  Context* context_ = nullptr;
};

}  // namespace gpumemx
