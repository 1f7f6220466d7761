// SPDX-License-Identifier: BSD-3-Clause
//
// Forks of a busy process: in the child only the forking thread exists, and any lock may be held
// for ever by one that does not. There, frees are ignored, requests fail, no driver is called.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "driver/sim/sim_driver.hpp"
#include "runtime/registry.hpp"

namespace gpumemx {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr int kForks = 100;       // each copies the sanitizer's shadow memory
constexpr bool kMayExit = false;  // at exit() it looks for leaks, and the child has no other stacks
#else
constexpr int kForks = 1000;
constexpr bool kMayExit = true;
#endif

constexpr int kDevices = 2;
std::atomic<std::uint64_t> driver_calls{0};

Result<std::unique_ptr<DeviceDriver>> open_simulated(int device) {
  SimOptions options;
  options.capacity = 4_GiB;
  options.device = static_cast<std::uint32_t>(device);
  auto gpu = std::make_unique<SimDriver>(options);
  gpu->set_call_hook([](DriverCall) { driver_calls.fetch_add(1); });
  return std::unique_ptr<DeviceDriver>(std::move(gpu));
}

StreamInfo main_stream() { return {{StreamId{1}, 0}, true}; }

AllocResult ask(Device& device, Bytes size) {
  return device.allocator->allocate({size, main_stream(), kDefaultPool, 0, nullptr});
}

// What the child finds wrong, as its exit status.
int live_in_child(const std::array<Device*, kDevices>& devices,
                  const std::vector<DeviceAddr>& blocks) {
  const std::uint64_t calls = driver_calls;
  DeviceRegistry& registry = DeviceRegistry::instance();
  if (!registry.is_shut_down()) return 10;
  for (Device* device : devices) {
    for (const DeviceAddr block :
         blocks) {  // each is live on one of them: the others' are ignored too
      if (!device->allocator->record_stream(block, main_stream())) return 11;
      device->allocator->free(block);
    }
    for (const Bytes size : {1_KiB, 64_MiB}) {
      const AllocResult got = ask(*device, size);
      if (got.ok()) return 12;
      if (got.failure->cause != OomCause::kShuttingDown) return 13;
      if (got.failure->requested != size) return 14;
    }
    if (device->allocator->trim({}).released.n != 0) return 15;
    if (device->allocator->maintain()) return 16;
  }
  if (registry.device(0).value() != devices[0]) return 17;
  if (registry.device(kDevices).ok()) return 18;  // not opened by the parent
  return driver_calls == calls ? 0 : 19;
}

TEST(ForkThreads, AChildOfABusyProcessFreesFailsAndLeaves) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer ends children of a process with threads";
#endif
  driver_calls = 0;
  DeviceRegistry& registry = DeviceRegistry::instance();
  registry.configure({}, open_simulated, nullptr);
  registry.set_device_count(kDevices + 1);
  std::array<Device*, kDevices> devices{};
  std::vector<DeviceAddr> blocks;
  for (int i = 0; i < kDevices; ++i) {
    devices[static_cast<std::size_t>(i)] = registry.device(i).value();
    Device& device = *devices[static_cast<std::size_t>(i)];
    device.allocator->record_history(1000);
    for (const Bytes size : {4_KiB, 3_MiB, 40_MiB}) blocks.push_back(ask(device, size).address);
  }

  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> requests{0};
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      Device& device = *devices[i % kDevices];
      std::mt19937 random(i);
      std::vector<DeviceAddr> live;
      for (int n = 0; !stop; ++n) {
        const AllocResult got = ask(device, {512ull << (random() % 17)});
        if (got.ok()) live.push_back(got.address);
        ++requests;
        while (live.size() > 20) {
          std::swap(live[random() % live.size()], live.back());
          device.allocator->free(live.back());
          live.pop_back();
        }
        if (n % 500 == 0) (void)device.allocator->trim({});
      }
      for (const DeviceAddr block : live) device.allocator->free(block);
    });
  }

  const auto began = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  int forks = 0;
  for (; forks < kForks && !HasFailure(); ++forks) {
    std::fflush(nullptr);  // a child that exits writes what is left in the buffers
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(10);  // a deadlock becomes a failure
      const int status = live_in_child(devices, blocks);
      if (kMayExit && forks % 2 == 0) std::exit(status);
      _exit(status);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "fork " << forks << ": the child died of signal "
                                   << WTERMSIG(status) << " (14: it hung)";
    if (WIFEXITED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0) << "fork " << forks;
    }
    if (forks % 8 == 0) std::this_thread::yield();
  }
  const double took = seconds();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(took, 20.0);
  std::printf("  %d forks in %.1f s, %llu requests meanwhile\n", forks, took,
              static_cast<unsigned long long>(requests.load()));

  // The parent noticed nothing.
  for (std::size_t i = 0; i < kDevices; ++i) {
    EXPECT_EQ(devices[i]->allocator->validate().value_or(""), "");
    EXPECT_TRUE(ask(*devices[i], 1_MiB).ok());
  }
}

}  // namespace
}  // namespace gpumemx
