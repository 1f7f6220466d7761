// SPDX-License-Identifier: BSD-3-Clause
#include "replay/device_addresses.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(DeviceAddresses, CountDownInChunksAndFillWhatTheyLeaveOver) {
  DeviceAddresses addresses;
  const DeviceAddr a = addresses.allocate(20_MiB);
  const DeviceAddr b = addresses.allocate(34_MiB);
  EXPECT_EQ(a - b, 64_MiB);
  EXPECT_EQ(addresses.allocate(20_MiB) - b, 34_MiB);  // the lowest rest that fits
  EXPECT_EQ(addresses.allocate(12_MiB) - a, 20_MiB);
  EXPECT_EQ(b - addresses.allocate(12_MiB), 32_MiB);  // 10 are left over: a new chunk
}

TEST(DeviceAddresses, ComeBackHighestFirst) {
  DeviceAddresses addresses;
  const DeviceAddr a = addresses.allocate(64_MiB), b = addresses.allocate(32_MiB);
  addresses.allocate(32_MiB);
  addresses.free({a, 64_MiB});
  EXPECT_EQ(addresses.allocate(30_MiB) - a, 32_MiB);
  addresses.free({b, 32_MiB});
  EXPECT_EQ(addresses.allocate(64_MiB), b);  // with the half of the first that is free
}

}  // namespace
}  // namespace gpumemx
