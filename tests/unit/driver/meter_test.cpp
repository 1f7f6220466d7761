// SPDX-License-Identifier: BSD-3-Clause
//
// What the meter counts, whom it counts for, and what it calls growth; and CountingDriver, which
// feeds it real time.
#include "driver/meter.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "driver/counting_driver.hpp"
#include "support/sim_tools.hpp"

namespace gpumemx {
namespace {

constexpr HandleId kHandle{7};
constexpr HandleId kOther{8};

TEST(Meter, CountsCallsFailuresAndBytes) {
  DriverMeter meter;
  meter.charge(DriverCall::kCreate, 1, true, kHandle, 2_MiB);
  meter.charge(DriverCall::kCreate, 1, false, {}, 2_MiB);
  meter.charge(DriverCall::kQuery, 1, true);
  EXPECT_EQ(meter.figures().count(DriverCall::kCreate), 2u);
  EXPECT_EQ(meter.figures().failures[static_cast<std::size_t>(DriverCall::kCreate)], 1u);
  EXPECT_EQ(meter.figures().count(DriverCall::kQuery), 1u);
  EXPECT_EQ(meter.figures().bytes_created, 2_MiB);
  EXPECT_DOUBLE_EQ(meter.figures().seconds, 3);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_of[static_cast<std::size_t>(DriverCall::kCreate)], 2);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_of[static_cast<std::size_t>(DriverCall::kQuery)], 1);
}

TEST(Meter, GrowthEndsWithTheFirstSuccessfulSetAccess) {
  DriverMeter meter;
  meter.charge(DriverCall::kCreate, 1, true, kHandle, 2_MiB);
  meter.charge(DriverCall::kMap, 10, true, kHandle);
  meter.charge(DriverCall::kSetAccess, 100, false, kHandle);
  meter.charge(DriverCall::kSetAccess, 1000, true, kHandle);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_growth, 1111);
  meter.charge(DriverCall::kUnmap, 1, true);
  meter.charge(DriverCall::kMap, 1, true, kHandle);
  meter.charge(DriverCall::kSetAccess, 1, true, kHandle);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_growth, 1111);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_inline, 1114);
}

TEST(Meter, ARefusedCreateIsNotGrowth) {
  DriverMeter meter;
  meter.charge(DriverCall::kCreate, 1, false, {}, 2_MiB);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_growth, 0);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_inline, 1);
}

TEST(Meter, ForgetsAHandleThatIsReleasedBeforeItWasAccessible) {
  DriverMeter meter;
  meter.charge(DriverCall::kCreate, 1, true, kHandle, 2_MiB);
  meter.charge(DriverCall::kRelease, 1, true, kHandle);
  meter.charge(DriverCall::kMap, 1, true, kHandle);  // a driver that gives the number again
  EXPECT_DOUBLE_EQ(meter.figures().seconds_growth, 1);
}

TEST(Meter, RemapsOfOneHandleAreNotGrowthOfAnother) {
  DriverMeter meter;
  meter.charge(DriverCall::kCreate, 1, true, kHandle, 2_MiB);
  meter.charge(DriverCall::kMap, 1, true, kOther);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_growth, 1);
}

TEST(Meter, BackgroundTimeIsNeitherInlineNorGrowth) {
  DriverMeter meter;
  {
    CallerRoleScope scope(CallerRole::kBackground);
    meter.charge(DriverCall::kCreate, 1, true, kHandle, 2_MiB);
    {
      CallerRoleScope inner(CallerRole::kInline);
      EXPECT_EQ(caller_role(), CallerRole::kInline);
    }
    EXPECT_EQ(caller_role(), CallerRole::kBackground);
    std::thread([] { EXPECT_EQ(caller_role(), CallerRole::kInline); }).join();
  }
  EXPECT_EQ(caller_role(), CallerRole::kInline);
  EXPECT_DOUBLE_EQ(meter.figures().seconds, 1);
  EXPECT_DOUBLE_EQ(meter.figures().seconds_inline, 0);
  meter.charge(DriverCall::kMap, 2, true, kHandle);  // still fresh, now somebody waits
  EXPECT_DOUBLE_EQ(meter.figures().seconds_growth, 2);
}

TEST(CountingDriver, ForwardsEveryCallAndTimesIt) {
  SimDriver gpu;
  CountingDriver counting(gpu);
  const AddrRange range = counting.reserve(4_MiB, 2_MiB).value();
  const AddrRange low{range.begin, 2_MiB};
  const AddrRange high{range.begin + 2_MiB, 2_MiB};
  const HandleId first = counting.create(2_MiB).value();
  const HandleId second = counting.create(2_MiB).value();
  EXPECT_TRUE(counting.map(low, first).ok());
  EXPECT_TRUE(counting.map(high, second).ok());
  EXPECT_TRUE(counting.set_access(range).ok());
  const double growth = counting.figures().seconds_growth;
  EXPECT_GT(growth, 0);
  EXPECT_TRUE(counting.unmap(low).ok());
  EXPECT_TRUE(counting.map(low, first).ok());
  EXPECT_TRUE(counting.set_access(low).ok());
  EXPECT_DOUBLE_EQ(counting.figures().seconds_growth, growth);
  EXPECT_FALSE(counting.release(first).ok());

  const DeviceAddr plain = counting.allocate(1_KiB).value();
  EXPECT_TRUE(counting.free(plain).ok());
  const EventId event = counting.record(gpu.default_stream()).value();
  EXPECT_TRUE(counting.wait(event).ok());
  EXPECT_TRUE(counting.query(event).value());
  counting.recycle(event);
  EXPECT_EQ(counting.memory().value().total, 1_TiB);
  const HandleId third = counting.import_handle(counting.export_handle(first).value()).value();
  EXPECT_TRUE(counting.release(third).ok());
  EXPECT_FALSE(counting.import_fabric(FabricHandle{}).ok());
  EXPECT_TRUE(counting.copy(low.begin, high.begin, 1_MiB).ok());
  EXPECT_TRUE(counting.synchronize().ok());
  counting.let_go(counting.hold({gpu.default_stream()}).value());
  {
    RelaxedCapture relaxed(counting);
    EXPECT_EQ(gpu.exchange_capture_mode(CaptureMode::kRelaxed), CaptureMode::kRelaxed);
  }
  EXPECT_TRUE(counting.unmap(low).ok());
  EXPECT_TRUE(counting.unmap(high).ok());
  EXPECT_TRUE(counting.release(first).ok());
  EXPECT_TRUE(counting.release(second).ok());
  EXPECT_TRUE(counting.unreserve(range).ok());
  EXPECT_TRUE(gpu.empty());

  const DriverFigures ours = counting.figures();
  EXPECT_EQ(ours.calls, gpu.meter().calls);
  EXPECT_EQ(ours.failures, gpu.meter().failures);
  EXPECT_EQ(ours.bytes_created, 4_MiB);
  EXPECT_GE(ours.seconds, ours.seconds_inline);
  EXPECT_GE(ours.seconds_inline, ours.seconds_growth);
}

}  // namespace
}  // namespace gpumemx
