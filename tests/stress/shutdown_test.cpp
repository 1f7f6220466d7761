// SPDX-License-Identifier: BSD-3-Clause
//
// A30: the process exits, in whatever order: blocks are live, the driver is going away or is gone.
// Nothing is said, nothing aborts, and once the allocator was told, it calls the driver no more.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

std::uint64_t calls(const SimDriver& gpu) {
  std::uint64_t sum = 0;
  for (const std::uint64_t n : gpu.meter().calls) sum += n;
  return sum;
}

struct Scene {
  explicit Scene(bool plain = false) : allocator(make(plain)) {
    gpu.set_manual(true);
    for (const StreamInfo& s :
         {StreamInfo{gpu.new_stream(), true}, StreamInfo{gpu.new_stream(), false}}) {
      streams.push_back(s);
      for (const Bytes size : {100_KiB, 3_MiB, 40_MiB}) blocks.push_back(get(size, s));
    }
    (void)allocator->record_stream(blocks[0], streams[1]);
    pool = allocator->create_pool({});
    blocks.push_back(get(5_MiB, streams[0], pool));
  }
  std::unique_ptr<DeviceAllocator> make(bool plain) {
    Options options;
    options.plain = plain;
    return std::make_unique<DeviceAllocator>(gpu, options);
  }
  DeviceAddr get(Bytes size, const StreamInfo& s, PoolId p = kDefaultPool) {
    return ask(size, s, p).address;
  }
  AllocResult ask(Bytes size, const StreamInfo& s, PoolId p = kDefaultPool) {
    AllocRequest request;
    request.size = size;
    request.stream = s;
    request.pool = p;
    return allocator->allocate(request);
  }
  // What destructors of tensors, graphs and pools do at the end.
  void use_everything() {
    for (const DeviceAddr b : blocks) allocator->free(b);
    for (const StreamInfo& s : streams) {
      for (const Bytes size : {1_KiB, 30_MiB, 700_MiB}) {
        const AllocResult result = ask(size, s);
        if (result.ok()) continue;
        EXPECT_EQ(result.failure->cause, OomCause::kShuttingDown)
            << to_string(result.failure->cause);
      }
    }
    allocator->begin_capture();
    allocator->end_capture();
    allocator->release_pool(pool);
    (void)allocator->trim({});
    (void)allocator->maintain();
    (void)allocator->stats();
    (void)allocator->blocks();
  }

  SimDriver gpu;
  std::unique_ptr<DeviceAllocator> allocator;
  std::vector<StreamInfo> streams;
  std::vector<DeviceAddr> blocks;
  PoolId pool{};
};

TEST(Shutdown, CallsNoDriverAfterItWasTold) {
  for (const bool plain : {false, true}) {
    Scene scene(plain);
    scene.allocator->shut_down();
    const std::uint64_t before = calls(scene.gpu);
    scene.gpu.shut_down();
    scene.use_everything();
    EXPECT_FALSE(scene.ask(1_KiB, scene.streams[0]).ok());
    scene.allocator.reset();
    EXPECT_EQ(scene.gpu.calls_after_shutdown(), 0u);
    EXPECT_EQ(calls(scene.gpu), before);
  }
}

TEST(Shutdown, SurvivesADriverThatGoesAwayUntold) {
  for (const bool plain : {false, true}) {
    Scene scene(plain);
    scene.gpu.shut_down();
    scene.use_everything();
    EXPECT_EQ(scene.allocator->validate(), std::nullopt);
    scene.allocator.reset();
    EXPECT_EQ(scene.gpu.hazard_count(), 0u);
  }
}

TEST(Shutdown, MayComeWhileOtherThreadsAllocate) {
  for (int round = 0; round < 20; ++round) {
    SimDriver gpu;
    DeviceAllocator allocator(gpu, {});
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, stream = StreamInfo{gpu.new_stream(), true}] {
        for (std::uint64_t i = 0; i < 200; ++i) {
          AllocRequest request;
          request.size = Bytes{(i * 7919) % (9 << 20)};
          request.stream = stream;
          const AllocResult result = allocator.allocate(request);
          if (result.ok() && i % 3 != 0) allocator.free(result.address);
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
    allocator.shut_down();
    gpu.shut_down();
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(gpu.hazard_count(), 0u);
  }
}

}  // namespace
}  // namespace gpumemx
