// SPDX-License-Identifier: BSD-3-Clause
//
// A mutex that clang's thread-safety analysis understands and that knows its holder, so that "this
// is called under that lock" is a check (assert_held) and not a comment.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "base/check.hpp"

#if defined(__clang__)
#define GPUMEMX_TSA(x) __attribute__((x))
#else
#define GPUMEMX_TSA(x)
#endif

#define GPUMEMX_CAPABILITY GPUMEMX_TSA(capability("mutex"))
#define GPUMEMX_SCOPED_CAPABILITY GPUMEMX_TSA(scoped_lockable)
#define GPUMEMX_GUARDED_BY(m) GPUMEMX_TSA(guarded_by(m))
#define GPUMEMX_REQUIRES(...) GPUMEMX_TSA(requires_capability(__VA_ARGS__))
#define GPUMEMX_EXCLUDES(...) GPUMEMX_TSA(locks_excluded(__VA_ARGS__))
#define GPUMEMX_ACQUIRE(...) GPUMEMX_TSA(acquire_capability(__VA_ARGS__))
#define GPUMEMX_TRY_ACQUIRE(...) GPUMEMX_TSA(try_acquire_capability(__VA_ARGS__))
#define GPUMEMX_RELEASE(...) GPUMEMX_TSA(release_capability(__VA_ARGS__))
#define GPUMEMX_ASSERT_CAPABILITY(m) GPUMEMX_TSA(assert_capability(m))
#define GPUMEMX_NO_TSA GPUMEMX_TSA(no_thread_safety_analysis)

namespace gpumemx {

// One atomic operation to take and one to let go while nobody else wants it. Who waits looks again for
// a few microseconds, since most holders are through in a hundred nanoseconds and a sleep costs both
// sides a call of the kernel, and sleeps then. (std::mutex is two function calls on top, which a hit of
// 100 ns would notice.)
class GPUMEMX_CAPABILITY Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() GPUMEMX_ACQUIRE() {
    if (!take()) wait();
    note_holder(true);
  }
  bool try_lock() GPUMEMX_TRY_ACQUIRE(true) {
    if (!take()) return false;
    note_holder(true);
    return true;
  }
  void unlock() GPUMEMX_RELEASE() {
    note_holder(false);
    if (state_.exchange(kFree, std::memory_order_release) == kWanted) state_.notify_one();
  }

  void assert_held() const GPUMEMX_ASSERT_CAPABILITY(this) {
    GPUMEMX_ASSERT(held_by_caller(), "called without the lock that guards this state");
  }

#ifndef NDEBUG
  // True when the calling thread holds this mutex; exact, since only the holder writes its own id.
  bool held_by_caller() const {
    return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
#endif

 private:
  static constexpr std::uint32_t kFree = 0, kHeld = 1;
  static constexpr std::uint32_t kWanted = 2;  // held, and somebody may be asleep

  bool take() {
    std::uint32_t state = kFree;
    return state_.compare_exchange_strong(state, kHeld, std::memory_order_acquire);
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  void wait() {
    // Ever more rarely, so that many who wait leave the line to the one that holds it.
    constexpr int kRounds = 8, kLongest = 16;
    for (int round = 0, pauses = 1; round < kRounds;
         ++round, pauses = std::min(pauses * 2, kLongest)) {
      for (int i = 0; i < pauses; ++i) pause();
      if (state_.load(std::memory_order_relaxed) == kFree && take()) return;
    }
    // Whoever slept takes it as wanted: others may still sleep.
    while (state_.exchange(kWanted, std::memory_order_acquire) != kFree) {
      state_.wait(kWanted, std::memory_order_relaxed);
    }
  }

  std::atomic<std::uint32_t> state_{kFree};
#ifdef NDEBUG
  static void note_holder(bool) {}
#else
  void note_holder(bool held) {
    holder_.store(held ? std::this_thread::get_id() : std::thread::id(), std::memory_order_relaxed);
  }
  std::atomic<std::thread::id> holder_{};
#endif
};

// Holds a mutex for a scope.
class GPUMEMX_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mu) GPUMEMX_ACQUIRE(mu) : mu_(mu) { mu_.lock(); }
  ~MutexLock() GPUMEMX_RELEASE() { mu_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mu_;
};

// Lets go, for a scope, of a mutex that the caller holds: around a driver call.
class GPUMEMX_SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mu) GPUMEMX_RELEASE(mu) : mu_(mu) { mu_.unlock(); }
  ~MutexUnlock() GPUMEMX_RELEASE() { mu_.lock(); }  // to clang: the scope ends, the mutex is back
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mu_;
};

}  // namespace gpumemx
