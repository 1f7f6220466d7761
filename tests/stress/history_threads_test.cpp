// SPDX-License-Identifier: BSD-3-Clause
//
// The history, looked at and switched by some threads while others allocate. What the thread sanitizer
// is run on; and each look must find a layout that its events lead to.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <thread>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"
#include "support/contexts.hpp"

namespace gpumemx {
namespace {

struct Ear final : HistoryListener {
  void on_event(const HistoryEvent& event) override { heard += event.size.n != 0 ? 1 : 0; }
  std::uint64_t heard = 0;  // guarded by the allocator's lock, as its calls are
};

std::map<std::uint64_t, Bytes> live_by_events(const std::vector<HistoryEvent>& events) {
  std::map<std::uint64_t, Bytes> live;
  for (const HistoryEvent& e : events) {
    if (e.kind == EventKind::kAlloc) live[e.address.n] = e.size;
    if (e.kind == EventKind::kFreeRequested) live.erase(e.address.n);
  }
  return live;
}

TEST(HistoryThreads, LooksAndSwitchesDoNotDisturbOrMissAnything) {
  SimOptions device;
  device.capacity = Bytes{4ull << 30};
  device.check_hazards = false;
  SimDriver gpu(device);
  DeviceAllocator allocator(gpu, Options{});
  allocator.record_history(1u << 22);
  std::atomic<int> working{3};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    const StreamInfo stream{t == 0 ? gpu.default_stream() : gpu.new_stream(), true};
    threads.emplace_back([&allocator, &working, stream, t] {
      const Cause cause{make_context(), std::make_shared<const unsigned>(t)};
      const CauseScope scope(cause);
      std::vector<DeviceAddr> held;
      for (std::uint64_t i = 0; i < 4000; ++i) {
        const Bytes size{i % 7 == 0 ? 5ull << 20 : 1000 + i};
        const auto got = allocator.allocate({size, stream, kDefaultPool, 0, cause.context.get()});
        EXPECT_TRUE(got.ok());
        if (!got.ok()) break;
        held.push_back(got.address);
        if (held.size() > 5) {
          (void)allocator.annotate(held[i % held.size()]);
          allocator.free(held[i % held.size()]);
          held[i % held.size()] = held.back();
          held.pop_back();
        }
      }
      for (const DeviceAddr a : held) allocator.free(a);
      --working;
    });
  }
  Ear ear;
  threads.emplace_back([&] {
    HistoryRules rules;
    for (int i = 0; working.load() != 0; ++i) {
      rules.skipped = i % 2 == 0 ? 0 : 1u << static_cast<int>(EventKind::kAnnotate);
      allocator.record_history(1u << (21 + i % 2), nullptr, rules, /*keep=*/true);
      allocator.listen(i % 3 == 0 ? nullptr : &ear);
      std::this_thread::yield();
    }
  });
  while (working.load() != 0) {
    const MemoryLayout layout = allocator.layout();
    auto live = live_by_events(allocator.history(layout.events));
    for (const BlockInfo& b : layout.blocks) {
      if (b.state != BlockState::kLive) continue;
      EXPECT_TRUE(live.contains(b.address.n));
      EXPECT_EQ(live[b.address.n], b.requested);
      live.erase(b.address.n);
    }
    EXPECT_TRUE(live.empty());
    allocator.note_snapshot(layout.active);
  }
  for (std::thread& t : threads) t.join();
  EXPECT_TRUE(live_by_events(allocator.history()).empty());
  EXPECT_EQ(allocator.validate().value_or(""), "");
}

}  // namespace
}  // namespace gpumemx
