// SPDX-License-Identifier: BSD-3-Clause
//
// One allocator a device, opened at its first use. The registry is one for the process, so each test
// uses devices of its own; what happens at fork is in tests/stress/.
#include "runtime/registry.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

class RegistryTest : public ::testing::Test {
 protected:
  RegistryTest() {
    devices_.configure(
        Options{},
        [this](int device) -> Result<std::unique_ptr<DeviceDriver>> {
          ++opened_;
          if (device == 9) return Error{Errc::kDriverFailure, {}, "no such card"};
          SimOptions options;
          options.capacity = 1_GiB;
          options.device = static_cast<std::uint32_t>(device);
          return std::unique_ptr<DeviceDriver>(std::make_unique<SimDriver>(options));
        },
        nullptr);
    devices_.set_device_count(10);
  }

  static AllocResult allocate(Device& device, Bytes size) {
    return device.allocator->allocate({size, {{StreamId{1}, 0}, true}, kDefaultPool, 0, nullptr});
  }

  DeviceRegistry& devices_ = DeviceRegistry::instance();
  int opened_ = 0;
};

TEST_F(RegistryTest, OpensADeviceAtItsFirstUseOnly) {
  EXPECT_EQ(devices_.device_count(), 10);
  EXPECT_EQ(devices_.if_open(0), nullptr);
  EXPECT_EQ(opened_, 0);
  const auto first = devices_.device(0);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first.value()->total, 1_GiB);
  EXPECT_EQ(devices_.device(0).value(), first.value());
  EXPECT_EQ(devices_.if_open(0), first.value());
  EXPECT_EQ(opened_, 1);
}

TEST_F(RegistryTest, NamesTheDeviceThatIsNotThere) {
  const auto beyond = devices_.device(10);
  ASSERT_FALSE(beyond.ok());
  EXPECT_EQ(beyond.error().code, Errc::kInvalidArgument);
  EXPECT_EQ(beyond.error().where, "device 10 of 10");
  EXPECT_EQ(devices_.device(-1).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(devices_.device(9).error().where, "no such card");
  EXPECT_EQ(devices_.if_open(9), nullptr);  // the next use tries again
}

TEST_F(RegistryTest, KnowsWhoseAnAddressIs) {
  Device& one = *devices_.device(1).value();
  Device& two = *devices_.device(2).value();
  const AllocResult a = allocate(one, 4_MiB), b = allocate(two, 4_MiB);
  EXPECT_EQ(devices_.owner_of(a.address), 1);
  EXPECT_EQ(devices_.owner_of(b.address), 2);
  EXPECT_EQ(devices_.owner_of({64}), -1);
  one.allocator->free(a.address);
  two.allocator->free(b.address);
}

TEST_F(RegistryTest, EmptyingTheCacheInEveryStepMarksWhatTheNextStepNeeds) {
  Options options;
  options.background = true;
  devices_.configure(
      options,
      [](int) -> Result<std::unique_ptr<DeviceDriver>> {
        SimOptions device;
        device.capacity = 1_GiB;
        return std::unique_ptr<DeviceDriver>(std::make_unique<SimDriver>(device));
      },
      nullptr);
  Device& device = *devices_.device(4).value();
  const auto held = [&] { return device.driver->memory().value().free; };
  const auto step = [&] {
    const AllocResult block = allocate(device, 64_MiB);
    ASSERT_TRUE(block.ok());
    device.allocator->free(block.address);
    devices_.empty_cache(device);
  };
  for (int call = 1; call <= 3; ++call) {
    step();
    EXPECT_EQ(held(), 1_GiB) << call;  // honest at once
  }
  step();
  EXPECT_EQ(device.allocator->stats().reserved_bytes.all().current, 0);
  EXPECT_EQ(held(), 1_GiB - device.allocator->returning());
  for (int i = 0; i < 2000 && held() != 1_GiB; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(held(), 1_GiB);  // nothing took it, so it went
}

TEST_F(RegistryTest, AFractionCapsADeviceBeforeAndAfterItIsOpened) {
  EXPECT_EQ(devices_.fraction(3), 1.0);
  devices_.set_fraction(3, 0.25);
  EXPECT_EQ(devices_.fraction(3), 0.25);
  Device& device = *devices_.device(3).value();
  EXPECT_EQ(device.allocator->cap(), 256_MiB);
  const AllocResult too_much = allocate(device, 300_MiB);
  ASSERT_FALSE(too_much.ok());
  EXPECT_EQ(too_much.failure->cause, OomCause::kCapped);
  devices_.set_fraction(3, 0.5);
  const AllocResult fits = allocate(device, 300_MiB);
  ASSERT_TRUE(fits.ok());
  device.allocator->free(fits.address);
  devices_.set_fraction(3, 0);  // nothing at all: a fraction like any other
  EXPECT_EQ(devices_.fraction(3), 0);
  EXPECT_EQ(device.allocator->cap(), 0_B);
}

TEST_F(RegistryTest, ASetupIsAppliedToOpenDevicesAndToThoseOpenedLater) {
  ASSERT_TRUE(devices_.device(6).ok());
  std::vector<int> first, second;
  devices_.apply_to_all([&](int index, Device& device) {
    EXPECT_NE(device.allocator, nullptr);
    first.push_back(index);
  });
  EXPECT_NE(std::find(first.begin(), first.end(), 6), first.end());
  first.clear();
  const auto opened = devices_.device(7);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(first, std::vector<int>{7});
  devices_.apply_to_all([&](int index, Device& device) {
    second.push_back(index);
    EXPECT_EQ(&device == opened.value(), index == 7);
  });
  ASSERT_TRUE(devices_.device(8).ok());
  EXPECT_EQ(first, std::vector<int>{7});
  EXPECT_EQ(second.back(), 8);
  devices_.apply_to_all(nullptr);
}

}  // namespace
}  // namespace gpumemx
