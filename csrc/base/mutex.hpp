// SPDX-License-Identifier: BSD-3-Clause
//
// A mutex that clang's thread-safety analysis understands and that knows its holder, so that "this
// is called under that lock" is a check (assert_held) and not a comment.
#pragma once

#include <atomic>
#include <mutex>
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

class GPUMEMX_CAPABILITY Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() GPUMEMX_ACQUIRE() {
    mu_.lock();
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  bool try_lock() GPUMEMX_TRY_ACQUIRE(true) {
    if (!mu_.try_lock()) return false;
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return true;
  }
  void unlock() GPUMEMX_RELEASE() {
    holder_.store(std::thread::id(), std::memory_order_relaxed);
    mu_.unlock();
  }

  // True when the calling thread holds this mutex; exact, since only the holder writes its own id.
  bool held_by_caller() const {
    return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  void assert_held() const GPUMEMX_ASSERT_CAPABILITY(this) {
    GPUMEMX_ASSERT(held_by_caller(), "called without the lock that guards this state");
  }

 private:
  std::mutex mu_;
  std::atomic<std::thread::id> holder_{};
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
