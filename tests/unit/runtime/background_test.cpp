// SPDX-License-Identifier: BSD-3-Clause
//
// The thread that maintains allocators. Its pace is real time, so these tests wait for what must
// happen, with a generous end, and check that what must not happen did not.
#include "runtime/background.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

using std::chrono::milliseconds;

bool comes_true(const std::function<bool()>& what) {
  for (int i = 0; i < 2000; ++i) {
    if (what()) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return false;
}

class BackgroundThreadTest : public ::testing::Test {
 protected:
  BackgroundThreadTest() : gpu_(device()), allocator_(gpu_, options()) {
    allocator_.set_maintenance_hook([this] { background_.wake(); });
    background_.add(allocator_);
  }
  static SimOptions device() {
    SimOptions options;
    options.capacity = 16_GiB;
    return options;
  }
  static Options options() {
    Options options;
    options.background = true;
    options.max_aliases = 1;
    options.cushion = 0;
    return options;
  }
  DeviceAddr alloc(Bytes size) {
    AllocResult got =
        allocator_.allocate({size, {gpu_.default_stream(), true}, kDefaultPool, 0, nullptr});
    EXPECT_TRUE(got.ok());
    return got.address;
  }

  SimDriver gpu_;
  DeviceAllocator allocator_;
  Background background_;
};

TEST_F(BackgroundThreadTest, UnmapsWhatRequestsHaveLeft) {
  allocator_.free(alloc(64_MiB));
  allocator_.free(alloc(64_MiB - 4_KiB));  // another heap: the same handles at a second address
  EXPECT_TRUE(comes_true([&] { return gpu_.mapping_count() == 4; }));
  EXPECT_GT(gpu_.meter().seconds, gpu_.meter().seconds_inline);  // it was not the requests' time
}

TEST_F(BackgroundThreadTest, GivesReturningMemoryToTheDeviceWhenNothingTakesIt) {
  allocator_.free(alloc(64_MiB));
  EXPECT_EQ(allocator_.give_back_later(), 64_MiB);
  background_.expect_returning(allocator_);
  EXPECT_EQ(gpu_.reserved_bytes(), 64_MiB);
  EXPECT_TRUE(comes_true([&] { return gpu_.reserved_bytes() == 0_B; }));
  EXPECT_EQ(allocator_.returning(), 0_B);
}

TEST_F(BackgroundThreadTest, LeavesReturningMemoryToAProgramThatTakesItAgain) {
  DeviceAddr block = alloc(64_MiB);
  const std::uint64_t created = gpu_.meter().count(DriverCall::kCreate);
  for (int step = 0; step < 10; ++step) {
    allocator_.free(block);
    EXPECT_EQ(allocator_.give_back_later(), 64_MiB);
    background_.expect_returning(allocator_);
    block = alloc(64_MiB);
  }
  EXPECT_EQ(gpu_.meter().count(DriverCall::kRelease), 0u);
  EXPECT_EQ(gpu_.meter().count(DriverCall::kCreate), created);
  allocator_.free(block);
}

TEST_F(BackgroundThreadTest, StopsWithWorkLeftAndMayBeStoppedTwice) {
  allocator_.free(alloc(64_MiB));
  EXPECT_EQ(allocator_.give_back_later(), 64_MiB);
  background_.expect_returning(allocator_);
  background_.stop();
  background_.stop();
  EXPECT_TRUE(allocator_.maintain(/*release_returning=*/true) || gpu_.reserved_bytes() == 0_B);
}

}  // namespace
}  // namespace gpumemx
