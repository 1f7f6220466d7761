// SPDX-License-Identifier: BSD-3-Clause
//
// A bench on a real device: streams, kernels that leave a pattern and kernels that count what is
// wrong with it, work that lags or waits for the host, captures. Nothing of <cuda.h> shows here, so
// the tests compile, and skip, where it is not.
//
// Kernels spin before they touch memory: what is handed over too early is overwritten while it is
// still to be read. Nothing in here waits for the device but synchronize() and wrong_words().
//
// Threads: every method may be called from any thread.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "core/allocator.hpp"
#include "driver/device_driver.hpp"

namespace gpumemx {

using std::chrono::microseconds;

class CudaLab {
 public:
  enum class Graph : std::uint64_t {};

  // One for the process. Null, with the reason in `why`, when this machine has no such device.
  static CudaLab* open(std::string& why);
  virtual ~CudaLab() = default;
  virtual DeviceDriver& driver() = 0;

  // Non-blocking: no order with the legacy stream. A destroyed one finishes its work.
  virtual StreamRef new_stream() = 0;
  virtual void destroy_stream(StreamRef stream) = 0;
  // The calling thread's own default stream: the same native value in every thread, ids differ.
  virtual StreamRef thread_stream() = 0;

  // Queue work. fill() leaves a pattern of `seed` in every word; check() counts the words that do
  // not hold it. Both spin for `delay` first. REQUIRES: a range of whole words.
  virtual void fill(StreamRef stream, AddrRange range, std::uint32_t seed,
                    microseconds delay = {}) = 0;
  virtual void check(StreamRef stream, AddrRange range, std::uint32_t seed,
                     microseconds delay = {}) = 0;
  virtual void set_words(StreamRef stream, AddrRange range, std::uint32_t word) = 0;  // a memset
  virtual void check_words(StreamRef stream, AddrRange range, std::uint32_t word) = 0;
  // Work queued on `later` from here on runs after what is queued on `first`.
  virtual void order(StreamRef first, StreamRef later) = 0;

  // Work queued after hold() stays pending until let_go(), or for 20 s: then was_overdue().
  virtual void hold(StreamRef stream) = 0;
  virtual void let_go() = 0;  // all that are held
  virtual bool was_overdue() const = 0;

  // In global mode. end_capture(): nothing when something made the capture invalid.
  virtual void begin_capture(StreamRef stream) = 0;
  virtual std::optional<Graph> end_capture(StreamRef stream) = 0;
  virtual void launch(Graph graph, StreamRef stream) = 0;
  virtual void destroy(Graph graph) = 0;

  virtual void synchronize(StreamRef stream) = 0;
  // Runs everything. How many words the checks since the last call found wrong.
  virtual std::uint64_t wrong_words() = 0;
  // Calls that failed and the first wrong ranges, in words, since the start.
  virtual std::string complaints() const = 0;
  virtual std::uint64_t words_checked() const = 0;  // since the start
};

// A device with an allocator on it. At the end nothing may be wrong, and all memory must be back.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    lab_ = CudaLab::open(why);
    if (lab_ == nullptr) {
      const char* required = std::getenv("GPUMEMX_REQUIRE_GPU");
      if (required != nullptr && std::string(required) == "1") {
        FAIL() << "GPUMEMX_REQUIRE_GPU=1, but " << why;
      }
      GTEST_SKIP() << why;
    }
    driver_ = &lab_->driver();
    (void)lab_->wrong_words();
    words_before_ = lab_->words_checked();
    began_ = std::chrono::steady_clock::now();
    start({});
  }

  void TearDown() override {
    if (lab_ == nullptr) return;
    lab_->let_go();
    EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
    EXPECT_EQ(lab_->complaints(), "");
    if (allocator_ != nullptr) {
      EXPECT_EQ(allocator_->validate().value_or(""), "");
      report();
    }
    allocator_.reset();
  }

  void start(const Options& options) {
    allocator_.reset();
    allocator_ = std::make_unique<DeviceAllocator>(*driver_, options);
  }

  // REQUIRES: there is memory; else the test fails and the range is empty.
  AddrRange allocate(Bytes size, StreamInfo stream, PoolId pool = kDefaultPool) {
    const AllocResult got = allocator_->allocate({size, stream, pool, 0, nullptr});
    EXPECT_TRUE(got.ok()) << got.failure->text();
    return got.ok() ? AddrRange{got.address, got.size} : AddrRange{};
  }
  Bytes reserved() const {
    return {static_cast<std::uint64_t>(allocator_->stats().reserved_bytes.all().current)};
  }
  PathCounts paths() const { return allocator_->stats().paths; }

  static StreamInfo permanent(StreamRef stream) { return {stream, true}; }
  static StreamInfo temporary(StreamRef stream) { return {stream, false}; }

  // Runs `work` on a thread of its own. When it is not back in time, the test fails, and what is
  // held on the device is let go so that it comes back.
  void in_time(std::chrono::seconds limit, const std::function<void()>& work) {
    std::future<void> done = std::async(std::launch::async, work);
    if (done.wait_for(limit) == std::future_status::ready) return;
    ADD_FAILURE() << "not back after " << limit.count() << " s";
    lab_->let_go();
    done.wait();
  }

  void report() const {
    const PathCounts p = paths();
    const double s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
    std::printf(
        "  hits %llu, misses %llu, created %llu, harvested own %llu, loose %llu, other %llu, alias "
        "switches %llu, re-pointed %llu, re-cut %llu, late %llu, waits %llu, aliases dropped %llu\n"
        "  %.1f million words checked, %.2f s\n",
        count(p.hits), count(p.misses), count(p.created), count(p.harvested_own),
        count(p.harvested_loose), count(p.harvested_other), count(p.alias_switches),
        count(p.repointed), count(p.recut), count(p.late_retired), count(p.waits),
        count(p.aliases_dropped), static_cast<double>(lab_->words_checked() - words_before_) / 1e6,
        s);
  }

  CudaLab* lab_ = nullptr;
  DeviceDriver* driver_ = nullptr;
  std::unique_ptr<DeviceAllocator> allocator_;

 private:
  static unsigned long long count(std::uint64_t n) { return n; }

  std::uint64_t words_before_ = 0;
  std::chrono::steady_clock::time_point began_;
};

}  // namespace gpumemx
