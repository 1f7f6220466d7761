// SPDX-License-Identifier: BSD-3-Clause
//
// What the allocator did, in order: a ring of events, and whoever wants to be told of each at once.
// It costs one branch when nobody does.
//
// Sizes are those that torch's traces carry: of blocks the bytes asked for, of segments the bytes
// mapped. The core reads no clock: whoever turns the history on may give it one.
//
// Why something happened is known further up: the calling thread says it with a CauseScope around
// its call, and every event that follows from the call carries it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/ring_buffer.hpp"
#include "base/units.hpp"
#include "core/context.hpp"

namespace gpumemx {

enum class PoolId : std::uint64_t {};  // 0 is the default pool
inline constexpr PoolId kDefaultPool{0};

enum class EventKind : std::uint8_t {
  kAlloc,
  kFreeRequested,  // by the caller
  kFreeCompleted,  // the block can be used again; the same moment unless streams were recorded on it
  kSegmentAlloc,   // a plain device allocation, after it exists
  kSegmentFree,    // before it goes
  kSegmentMap,     // memory came to stand at these addresses of a heap
  kSegmentUnmap,   // and left them
  kOutOfMemory,
  kSnapshot,  // somebody looked: size has the active bytes
  kAnnotate,  // something was said about a live block
};
inline constexpr int kEventKinds = 10;

struct HistoryEvent {
  EventKind kind;
  DeviceAddr address;  // kOutOfMemory: the device's free bytes
  Bytes size;
  StreamRef stream;
  PoolId pool{};
  std::uint64_t tag = 0;
  ContextRef context{};                          // where in the program
  std::shared_ptr<const void> remark = nullptr;  // what the program said about it
  std::int64_t time = 0;                         // what the clock said; 0 without one
};

// Opaque to the core. Either may be null.
struct Cause {
  ContextRef context;
  std::shared_ptr<const void> remark;
};

// While it lives, what the calling thread does has this cause, and not that of a scope around it.
class CauseScope {
 public:
  explicit CauseScope(const Cause& cause) : before_(current_) { current_ = &cause; }
  ~CauseScope() { current_ = before_; }
  CauseScope(const CauseScope&) = delete;
  CauseScope& operator=(const CauseScope&) = delete;

  static const Cause* current() { return current_; }

 private:
  inline static constinit thread_local const Cause* current_ = nullptr;
  const Cause* const before_;
};

// The context of what happens now, or null.
inline ContextRef current_context() {
  const Cause* cause = CauseScope::current();
  return cause == nullptr ? nullptr : cause->context;
}

// Told of every event, also of those that no ring keeps.
class HistoryListener {
 public:
  virtual ~HistoryListener() = default;
  // Called with the books locked, at the moment of the event. Must not call the allocator, nor wait
  // for anybody who may be inside it. Must not throw.
  virtual void on_event(const HistoryEvent& event) = 0;
};

struct HistoryRules {
  bool contexts = true;       // kept in the ring's events, and not with the blocks alone
  std::uint32_t skipped = 0;  // kinds that the ring leaves out: bits 1 << kind
};

class History {
 public:
  using Clock = std::int64_t (*)();

  // Whether events are wanted at all.
  bool on() const { return recording() || listener_ != nullptr; }
  bool recording() const { return ring_.capacity() != 0; }

  // Starts empty with room for `capacity` events; 0 turns the ring off.
  void reset(std::size_t capacity, Clock clock, const HistoryRules& rules = {}) {
    ring_.reset(capacity);
    clock_ = clock;
    rules_ = rules;
  }
  // Takes over the ring and the rules of `other`, which gets what was here: so that neither making
  // nor dropping a long ring needs the lock that guards this one. REQUIRES: the other ring is empty.
  void exchange(History& other) {
    std::swap(ring_, other.ring_);
    std::swap(clock_, other.clock_);
    std::swap(rules_, other.rules_);
  }
  // What is here goes on with another length, clock and rules. REQUIRES: recording(), capacity >= 1.
  void change(std::size_t capacity, Clock clock, const HistoryRules& rules) {
    ring_.resize(capacity);
    clock_ = clock;
    rules_ = rules;
  }
  // Null for nobody. Its clock is used while the ring has none.
  void set_listener(HistoryListener* listener, Clock clock) {
    listener_ = listener;
    listener_clock_ = clock;
  }

  // `own`: the event's context where no cause has one. REQUIRES: on(); the event has none yet.
  void push(HistoryEvent event, const ContextRef& own = {}) {
    if (const Clock clock = clock_ != nullptr ? clock_ : listener_clock_) event.time = clock();
    const Cause* cause = CauseScope::current();
    if (cause != nullptr) event.remark = cause->remark;
    if (rules_.contexts) {
      event.context = cause != nullptr && cause->context != nullptr ? cause->context : own;
    }
    if (listener_ != nullptr) listener_->on_event(event);
    if (!recording() || (rules_.skipped >> static_cast<int>(event.kind) & 1) != 0) return;
    ring_.push(std::move(event));
    ++end_;
    // What the next events will overwrite was last touched a whole ring ago. It is fetched meanwhile:
    // the entry, and later the context that it lets go of.
    if (const HistoryEvent* far = ring_.to_go(kFetchedAhead)) __builtin_prefetch(far);
    if (const HistoryEvent* near = ring_.to_go(kFetchedAhead / 2)) {
      if (const Context* context = near->context.get()) __builtin_prefetch(context, /*rw=*/1);
    }
  }

  const RingBuffer<HistoryEvent>& events() const { return ring_; }
  // Serial numbers: of the oldest event that is here, and of the next one to come.
  std::uint64_t begin() const { return end_ - ring_.size(); }
  std::uint64_t end() const { return end_; }

 private:
  static constexpr std::size_t kFetchedAhead = 8;  // entries: two or three blocks

  RingBuffer<HistoryEvent> ring_;
  Clock clock_ = nullptr;
  HistoryRules rules_;
  HistoryListener* listener_ = nullptr;
  Clock listener_clock_ = nullptr;
  std::uint64_t end_ = 0;
};

}  // namespace gpumemx
