// SPDX-License-Identifier: BSD-3-Clause
//
// The rules of driver/device_driver.hpp, one test each, run over every driver. A new driver adds a
// ContractDevice and one line at the bottom, and no test.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/contract_device.hpp"
#include "support/error_of.hpp"

namespace gpumemx {
namespace {

struct Candidate {
  const char* name;
  std::unique_ptr<ContractDevice> (*make)(std::string& why);
  friend void PrintTo(const Candidate& c, std::ostream* out) { *out << c.name; }
};

bool is_gpu_required() {
  const char* value = std::getenv("GPUMEMX_REQUIRE_GPU");
  return value != nullptr && std::string(value) == "1";
}

class DriverContract : public ::testing::TestWithParam<Candidate> {
 protected:
  struct Page {
    AddrRange range;
    HandleId handle{};
  };

  void SetUp() override {
    std::string why;
    device_ = GetParam().make(why);
    if (device_ == nullptr) {
      if (is_gpu_required()) FAIL() << "GPUMEMX_REQUIRE_GPU=1, but " << why;
      GTEST_SKIP() << why;
    }
    driver_ = &device_->driver();
    page_ = driver_->traits().granularity;
    main_ = device_->new_stream();
    other_ = device_->new_stream();
  }

  void TearDown() override {
    if (device_ == nullptr) return;
    EXPECT_EQ(device_->finish(), "");
    for (const AddrRange range : mapped_) EXPECT_TRUE(driver_->unmap(range).ok());
    for (const HandleId handle : handles_) EXPECT_TRUE(driver_->release(handle).ok());
    for (const AddrRange range : reserved_) EXPECT_TRUE(driver_->unreserve(range).ok());
    EXPECT_EQ(device_->finish(), "");
  }

  // What the test leaves of these, TearDown() gives back.
  AddrRange reserve(Bytes size) {
    const auto range = driver_->reserve(size, page_);
    EXPECT_TRUE(range.ok());
    reserved_.push_back(range.value());
    return range.value();
  }
  HandleId create(Bytes size) {
    const auto handle = driver_->create(size);
    EXPECT_TRUE(handle.ok());
    handles_.insert(handle.value());
    return handle.value();
  }
  void map(AddrRange range, HandleId handle) {
    EXPECT_TRUE(driver_->map(range, handle).ok());
    mapped_.push_back(range);
  }
  void make_usable(AddrRange range, HandleId handle) {
    map(range, handle);
    EXPECT_TRUE(driver_->set_access(range).ok());
  }
  Page make_page() {
    const Page page{reserve(page_), create(page_)};
    make_usable(page.range, page.handle);
    return page;
  }
  void unmap(AddrRange range) {
    EXPECT_TRUE(driver_->unmap(range).ok());
    std::erase(mapped_, range);
  }

  // Whether memory().free moves by exactly `by` over `act`; where others use the device too, in
  // one of several tries, each of which `undo` takes back.
  bool free_memory_moves(std::int64_t by, const std::function<void()>& act,
                         const std::function<void()>& undo) {
    for (int tries = device_->is_alone() ? 1 : 20; tries > 0; --tries) {
      const std::uint64_t before = driver_->memory().value().free.n;
      act();
      const std::uint64_t after = driver_->memory().value().free.n;
      if (after == before + static_cast<std::uint64_t>(by)) return true;
      undo();
    }
    return false;
  }

  std::unique_ptr<ContractDevice> device_;
  DeviceDriver* driver_ = nullptr;
  Bytes page_;
  StreamRef main_;
  StreamRef other_;

 private:
  std::vector<AddrRange> mapped_;
  std::set<HandleId> handles_;
  std::vector<AddrRange> reserved_;
};

TEST_P(DriverContract, ReservedRangesAreAlignedAsAsked) {
  for (const std::uint64_t factor : {1u, 2u, 64u}) {
    const Bytes alignment = page_ * factor;
    const auto range = driver_->reserve(page_ * 3, alignment);
    ASSERT_TRUE(range.ok());
    EXPECT_EQ(range.value().begin.n % alignment.n, 0u);
    EXPECT_EQ(range.value().size, page_ * 3);
    EXPECT_TRUE(driver_->unreserve(range.value()).ok());
  }
}

TEST_P(DriverContract, ReservingAddressesCostsNoMemory) {
  AddrRange range;
  EXPECT_TRUE(free_memory_moves(
      0, [&] { range = driver_->reserve(1_TiB, page_).value(); },
      [&] { EXPECT_TRUE(driver_->unreserve(range).ok()); }));
  EXPECT_TRUE(driver_->unreserve(range).ok());
}

TEST_P(DriverContract, ReservedRangesDoNotOverlap) {
  const AddrRange a = reserve(page_ * 2);
  const AddrRange b = reserve(page_ * 2);
  EXPECT_FALSE(a.overlaps(b));
}

TEST_P(DriverContract, AHandleTakesItsSizeOfMemoryAndGivesItBack) {
  const Bytes size = page_ * 8;
  HandleId handle{};
  EXPECT_TRUE(free_memory_moves(
      -static_cast<std::int64_t>(size.n), [&] { handle = driver_->create(size).value(); },
      [&] { EXPECT_TRUE(driver_->release(handle).ok()); }));
  EXPECT_TRUE(free_memory_moves(
      static_cast<std::int64_t>(size.n), [&] { EXPECT_TRUE(driver_->release(handle).ok()); },
      [&] { handle = driver_->create(size).value(); }));
}

TEST_P(DriverContract, CreateReportsOutOfMemoryAndTakesNothing) {
  const Bytes too_much = round_up(driver_->memory().value().total, page_) + page_;
  EXPECT_TRUE(free_memory_moves(
      0,
      [&] {
        const auto handle = driver_->create(too_much);
        ASSERT_FALSE(handle.ok());
        EXPECT_EQ(handle.error().code, Errc::kOutOfMemory);
        EXPECT_EQ(handle.error().requested, too_much);
      },
      [] {}));
}

TEST_P(DriverContract, SizesThatAreNoMultipleOfTheGranularityAreRefused) {
  EXPECT_EQ(error_of(driver_->create(page_ + 512_B)), Errc::kInvalidArgument);
  EXPECT_EQ(error_of(driver_->create(0_B)), Errc::kInvalidArgument);
  EXPECT_EQ(error_of(driver_->reserve(page_ + 512_B, page_)), Errc::kInvalidArgument);
  EXPECT_EQ(error_of(driver_->reserve(0_B, page_)), Errc::kInvalidArgument);
  EXPECT_EQ(error_of(driver_->reserve(page_, page_ * 3)), Errc::kInvalidArgument);
  device_->forget_complaints();
}

TEST_P(DriverContract, MemoryHoldsWhatWasWritten) {
  const Page page = make_page();
  device_->fill(main_, page.range, 0x1234);
  device_->check(main_, page.range, 0x1234);
}

TEST_P(DriverContract, WorkCrossesTheBorderOfTwoHandles) {
  const AddrRange range = reserve(page_ * 2);
  map({range.begin, page_}, create(page_));
  map({range.begin + page_, page_}, create(page_));
  EXPECT_TRUE(driver_->set_access(range).ok());
  const AddrRange across{range.begin + page_ - 1_KiB, 2_KiB};
  device_->fill(main_, across, 7);
  device_->check(main_, across, 7);
}

TEST_P(DriverContract, OnlyAWholeHandleIsMapped) {
  const AddrRange range = reserve(page_ * 2);
  const HandleId handle = create(page_ * 2);
  EXPECT_EQ(error_of(driver_->map({range.begin, page_}, handle)), Errc::kInvalidArgument);
  device_->forget_complaints();
  make_usable(range, handle);  // the refused call had no effect
  EXPECT_EQ(error_of(driver_->unmap({range.begin, page_})), Errc::kInvalidArgument);
  device_->forget_complaints();
  device_->fill(main_, {range.begin, page_}, 3);
  device_->check(main_, {range.begin, page_}, 3);
}

TEST_P(DriverContract, AliasesAreCoherentInStreamOrder) {
  const Page page = make_page();
  const AddrRange alias = reserve(page_);
  make_usable(alias, page.handle);
  device_->fill(main_, page.range, 1);
  device_->check(main_, alias, 1);
  device_->fill(main_, alias, 2);
  device_->check(main_, page.range, 2);
}

TEST_P(DriverContract, AnAliasMayBeMadeWhileTheWriterIsPending) {
  const Page page = make_page();
  const AddrRange alias = reserve(page_);
  device_->hold(main_);
  device_->fill(main_, page.range, 9);
  make_usable(alias, page.handle);
  device_->check(main_, alias, 9);
  const EventId event = driver_->record(main_).value();
  EXPECT_FALSE(driver_->query(event).value());
  device_->let_go(main_);
  EXPECT_TRUE(driver_->wait(event).ok());
  driver_->recycle(event);
  unmap(page.range);  // the writer is done: the old address can go
  device_->check(main_, alias, 9);
}

TEST_P(DriverContract, ARangeIsReusedAfterUnmap) {
  const Page page = make_page();
  device_->fill(main_, page.range, 1);
  EXPECT_EQ(device_->finish(), "");
  unmap(page.range);
  const HandleId other = create(page_);
  make_usable(page.range, other);
  device_->fill(main_, page.range, 2);
  device_->check(main_, page.range, 2);
  EXPECT_EQ(device_->finish(), "");
  // The first handle kept what it held.
  const AddrRange elsewhere = reserve(page_);
  make_usable(elsewhere, page.handle);
  device_->check(main_, elsewhere, 1);
}

TEST_P(DriverContract, HandlesKeepTheirContentsInWhateverOrderTheyAreMappedAgain) {
  constexpr std::uint32_t kPages = 4;
  const AddrRange range = reserve(page_ * kPages);
  const auto place = [&](std::uint32_t i) { return AddrRange{range.begin + page_ * i, page_}; };
  std::vector<HandleId> handles;
  for (std::uint32_t i = 0; i < kPages; ++i) {
    handles.push_back(create(page_));
    make_usable(place(i), handles.back());
    device_->fill(main_, place(i), 100 + i);
  }
  EXPECT_EQ(device_->finish(), "");
  for (std::uint32_t i = 0; i < kPages; ++i) unmap(place(i));
  for (std::uint32_t i = 0; i < kPages; ++i) map(place(kPages - 1 - i), handles[i]);
  EXPECT_TRUE(driver_->set_access(range).ok());
  for (std::uint32_t i = 0; i < kPages; ++i) device_->check(main_, place(kPages - 1 - i), 100 + i);
}

TEST_P(DriverContract, VirtualMemoryCallsDoNotWaitForWorkElsewhere) {
  const Page busy = make_page();
  const Page idle = make_page();
  device_->hold(main_);
  device_->fill(main_, busy.range, 5);
  unmap(idle.range);
  const HandleId extra = driver_->create(page_).value();
  make_usable(idle.range, idle.handle);
  EXPECT_TRUE(driver_->release(extra).ok());
  const AddrRange range = driver_->reserve(page_, page_).value();
  EXPECT_TRUE(driver_->unreserve(range).ok());
  EXPECT_TRUE(driver_->memory().ok());
  device_->fill(other_, idle.range, 6);
  device_->check(other_, idle.range, 6);
  const EventId done = driver_->record(other_).value();
  EXPECT_TRUE(driver_->wait(done).ok());
  const EventId pending = driver_->record(main_).value();
  EXPECT_FALSE(driver_->query(pending).value());  // it was held all the while
  device_->let_go(main_);
  driver_->recycle(done);
  driver_->recycle(pending);
  device_->check(main_, busy.range, 5);
}

TEST_P(DriverContract, AnEventIsDoneWhenTheWorkBeforeItIsAndForEverAfter) {
  const Page page = make_page();
  device_->hold(main_);
  device_->fill(main_, page.range, 5);
  const EventId event = driver_->record(main_).value();
  EXPECT_FALSE(driver_->query(event).value());
  device_->let_go(main_);
  EXPECT_TRUE(driver_->wait(event).ok());
  EXPECT_TRUE(driver_->query(event).value());
  device_->hold(main_);
  device_->fill(main_, page.range, 6);
  EXPECT_TRUE(driver_->query(event).value());
  EXPECT_TRUE(driver_->wait(event).ok());
  device_->let_go(main_);
  driver_->recycle(event);
}

TEST_P(DriverContract, WaitAnyDoesNotWaitForAStreamThatIsHeld) {
  const Page page = make_page(), held = make_page();
  device_->hold(main_);
  device_->fill(main_, held.range, 4);
  const EventId stuck = driver_->record(main_).value();
  device_->fill(other_, page.range, 5);
  const EventId free = driver_->record(other_).value();
  const auto reached = driver_->wait_any({stuck, free});
  ASSERT_TRUE(reached.ok());
  EXPECT_EQ(reached.value(), 1u);
  EXPECT_TRUE(driver_->query(free).value());
  EXPECT_FALSE(driver_->query(stuck).value());
  device_->let_go(main_);
  EXPECT_EQ(driver_->wait_any({stuck}).value(), 0u);
  EXPECT_EQ(driver_->wait_any({stuck, free}).value(), 0u);  // both: the first in the list
  EXPECT_TRUE(driver_->query(stuck).value());
  driver_->recycle(stuck);
  driver_->recycle(free);
}

TEST_P(DriverContract, ARecycledEventMayServeAgain) {
  for (int i = 0; i < 100; ++i) {
    const EventId first = driver_->record(main_).value();
    const EventId second = driver_->record(other_).value();
    EXPECT_NE(first, second);
    EXPECT_TRUE(driver_->wait(first).ok());
    EXPECT_TRUE(driver_->wait(second).ok());
    EXPECT_TRUE(driver_->query(first).value());
    driver_->recycle(first);
    driver_->recycle(second);
  }
}

TEST_P(DriverContract, RecordIsRefusedWhileItsStreamCapturesAndLeavesTheCaptureValid) {
  device_->begin_capture(main_, CaptureMode::kGlobal);
  const auto event = driver_->record(main_);
  ASSERT_FALSE(event.ok());
  EXPECT_EQ(event.error().code, Errc::kCaptureActive);
  const auto elsewhere = driver_->record(other_);
  EXPECT_TRUE(elsewhere.ok());
  EXPECT_TRUE(device_->end_capture(main_));
  driver_->recycle(elsewhere.value());
}

TEST_P(DriverContract, AStreamHasANameOfItsOwnForAsLongAsItCaptures) {
  const auto name = [&](StreamRef stream) {
    const auto id = driver_->stream_id(stream.native);
    EXPECT_TRUE(id.ok());
    return id.ok() ? id.value() : StreamId{};
  };
  EXPECT_EQ(name(main_), main_.id);
  device_->begin_capture(main_, CaptureMode::kGlobal);
  const StreamId in_capture = name(main_);
  EXPECT_NE(in_capture, main_.id);
  EXPECT_EQ(name(main_), in_capture);
  EXPECT_EQ(name(other_), other_.id);
  EXPECT_TRUE(device_->end_capture(main_));
  EXPECT_EQ(name(main_), main_.id);
  device_->begin_capture(main_, CaptureMode::kGlobal);
  EXPECT_NE(name(main_), in_capture);  // of another capture
  EXPECT_TRUE(device_->end_capture(main_));
}

TEST_P(DriverContract, ARelaxedThreadMayDoEverythingDuringAGlobalCapture) {
  const EventId event = driver_->record(other_).value();
  device_->begin_capture(main_, CaptureMode::kGlobal);
  const auto all_calls = [&] {
    RelaxedCapture relaxed(*driver_);
    EXPECT_TRUE(driver_->query(event).ok());
    EXPECT_TRUE(driver_->wait(event).ok());
    EXPECT_TRUE(driver_->query(event).value());
    const auto plain = driver_->allocate(1_MiB);
    EXPECT_TRUE(plain.ok());
    EXPECT_TRUE(driver_->free(plain.value()).ok());
    EXPECT_TRUE(driver_->memory().ok());
  };
  all_calls();
  std::thread(all_calls).join();
  EXPECT_TRUE(device_->end_capture(main_));
  driver_->recycle(event);
}

TEST_P(DriverContract, VirtualMemoryCallsAreAllowedDuringAGlobalCaptureInAnyMode) {
  device_->begin_capture(main_, CaptureMode::kGlobal);
  const auto all_calls = [&] {
    const AddrRange range = driver_->reserve(page_, page_).value();
    const HandleId handle = driver_->create(page_).value();
    EXPECT_TRUE(driver_->map(range, handle).ok());
    EXPECT_TRUE(driver_->set_access(range).ok());
    EXPECT_TRUE(driver_->unmap(range).ok());
    EXPECT_TRUE(driver_->release(handle).ok());
    EXPECT_TRUE(driver_->unreserve(range).ok());
  };
  all_calls();
  std::thread(all_calls).join();
  EXPECT_TRUE(device_->end_capture(main_));
}

TEST_P(DriverContract, AQueryOfAnotherThreadEndsAGlobalCapture) {
  const EventId event = driver_->record(other_).value();
  device_->begin_capture(main_, CaptureMode::kGlobal);
  std::thread([&] {
    const auto done = driver_->query(event);
    ASSERT_FALSE(done.ok());
    EXPECT_EQ(done.error().code, Errc::kInvalidArgument);
  }).join();
  EXPECT_FALSE(device_->end_capture(main_));
  device_->forget_complaints();
  driver_->recycle(event);
}

TEST_P(DriverContract, TheCaptureModeBelongsToTheThreadAndIsPutBack) {
  EXPECT_EQ(driver_->exchange_capture_mode(CaptureMode::kThreadLocal), CaptureMode::kGlobal);
  {
    RelaxedCapture relaxed(*driver_);
    std::thread([&] {
      EXPECT_EQ(driver_->exchange_capture_mode(CaptureMode::kRelaxed), CaptureMode::kGlobal);
    }).join();
    RelaxedCapture nested(*driver_);
  }
  EXPECT_EQ(driver_->exchange_capture_mode(CaptureMode::kGlobal), CaptureMode::kThreadLocal);
}

TEST_P(DriverContract, AnImportedHandleIsTheSameMemory) {
  if (!driver_->traits().exportable) GTEST_SKIP() << "handles of this device stay in the process";
  const Page page = make_page();
  device_->fill(main_, page.range, 77);
  EXPECT_EQ(device_->finish(), "");
  const auto fd = driver_->export_handle(page.handle);
  ASSERT_TRUE(fd.ok());
  // As another process has it: a descriptor of its own for the same file.
  const int theirs = ::dup(fd.value());
  const auto imported = driver_->import_handle(theirs);
  ASSERT_TRUE(imported.ok());
  (void)::close(theirs);
  EXPECT_NE(imported.value(), page.handle);
  const AddrRange range = reserve(page_);
  make_usable(range, imported.value());
  device_->check(main_, range, 77);
  device_->fill(main_, range, 78);
  device_->check(main_, page.range, 78);
  EXPECT_EQ(device_->finish(), "");
  unmap(range);
  EXPECT_TRUE(driver_->release(imported.value()).ok());
}

TEST_P(DriverContract, AHandleIsExportedOnceAndTheDescriptorGoesWithIt) {
  if (!driver_->traits().exportable) GTEST_SKIP() << "handles of this device stay in the process";
  const auto handle = driver_->create(page_);
  ASSERT_TRUE(handle.ok());
  const auto fd = driver_->export_handle(handle.value());
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(driver_->export_handle(handle.value()).value(), fd.value());
  EXPECT_EQ(::fcntl(fd.value(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_TRUE(driver_->release(handle.value()).ok());
  EXPECT_EQ(::fcntl(fd.value(), F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST_P(DriverContract, AnExportedHandleGivesItsMemoryBackWhenItIsReleased) {
  if (!driver_->traits().exportable) GTEST_SKIP() << "handles of this device stay in the process";
  HandleId handle{};
  const auto take = [&] {
    handle = driver_->create(page_ * 8).value();
    EXPECT_TRUE(driver_->export_handle(handle).ok());
  };
  take();
  EXPECT_TRUE(free_memory_moves(
      static_cast<std::int64_t>((page_ * 8).n), [&] { EXPECT_TRUE(driver_->release(handle).ok()); },
      take));
}

TEST_P(DriverContract, WhatIsNoExportedMemoryCantBeImported) {
  if (!driver_->traits().exportable) GTEST_SKIP() << "handles of this device stay in the process";
  EXPECT_FALSE(driver_->import_handle(-1).ok());
  const int other = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ASSERT_GE(other, 0);
  EXPECT_FALSE(driver_->import_handle(other).ok());
  (void)::close(other);
  EXPECT_FALSE(driver_->import_fabric(FabricHandle{}).ok());
  device_->forget_complaints();
}

TEST_P(DriverContract, SynchronizeWaitsForWorkOnAllStreams) {
  const Page page = make_page();
  device_->fill(main_, page.range, 5);
  device_->fill(other_, page.range, 6);
  const EventId mine = driver_->record(main_).value();
  const EventId theirs = driver_->record(other_).value();
  EXPECT_TRUE(driver_->synchronize().ok());
  EXPECT_TRUE(driver_->query(mine).value());
  EXPECT_TRUE(driver_->query(theirs).value());
  driver_->recycle(mine);
  driver_->recycle(theirs);
}

TEST_P(DriverContract, HeldWorkMeetsTheMemoryThatIsThereAfterwards) {
  const Page page = make_page();
  const HandleId other = create(page_);
  device_->fill(main_, page.range, 5);
  const auto held = driver_->hold({main_, other_});
  ASSERT_TRUE(held.ok());
  device_->fill(main_, page.range, 6);  // queued over the old memory
  unmap(page.range);
  make_usable(page.range, other);
  const AddrRange elsewhere = reserve(page_);
  make_usable(elsewhere, page.handle);
  driver_->let_go(held.value());
  device_->check(main_, page.range, 6);
  device_->check(main_, elsewhere, 5);
}

TEST_P(DriverContract, NothingIsHeldWhereAStreamCaptures) {
  const Page page = make_page();
  device_->begin_capture(other_, CaptureMode::kRelaxed);
  EXPECT_EQ(error_of(driver_->hold({main_, other_})), Errc::kCaptureActive);
  EXPECT_TRUE(device_->end_capture(other_));
  device_->fill(main_, page.range, 5);
  device_->check(main_, page.range, 5);
}

TEST_P(DriverContract, ACopyIsThereWhenTheCallReturns) {
  const Page from = make_page();
  const Page to = make_page();
  const Bytes half{page_.n / 2};
  device_->fill(main_, {from.range.begin, half}, 21);
  device_->fill(main_, {from.range.begin + half, half}, 22);
  device_->fill(main_, to.range, 23);
  EXPECT_TRUE(driver_->synchronize().ok());
  EXPECT_TRUE(driver_->copy(to.range.begin + 512_B, from.range.begin + 512_B, page_ - 1_KiB).ok());
  device_->check(main_, {to.range.begin, 512_B}, 23);
  device_->check(main_, {to.range.begin + 512_B, half - 512_B}, 21);
  device_->check(main_, {to.range.begin + half, half - 512_B}, 22);
  device_->check(main_, {to.range.end() - 512_B, 512_B}, 23);
}

TEST_P(DriverContract, ACopyGoesAcrossTheBordersOfHandles) {
  const AddrRange from = reserve(page_ * 2);
  const AddrRange to = reserve(page_ * 3);
  make_usable({from.begin, page_}, create(page_));
  make_usable({from.begin + page_, page_}, create(page_));
  make_usable({to.begin, page_ * 3}, create(page_ * 3));
  device_->fill(main_, {from.begin, page_}, 31);
  device_->fill(main_, {from.begin + page_, page_}, 32);
  EXPECT_TRUE(driver_->synchronize().ok());
  EXPECT_TRUE(driver_->copy(to.begin + 512_B, from.begin, page_ * 2).ok());
  device_->check(main_, {to.begin + 512_B, page_}, 31);
  device_->check(main_, {to.begin + page_ + 512_B, page_}, 32);
}

TEST_P(DriverContract, PlainAllocationsHoldWhatWasWritten) {
  const auto address = driver_->allocate(3_MiB);
  ASSERT_TRUE(address.ok());
  device_->fill(main_, {address.value(), 3_MiB}, 11);
  device_->check(main_, {address.value(), 3_MiB}, 11);
  EXPECT_TRUE(driver_->free(address.value()).ok());  // after the work, by itself
}

TEST_P(DriverContract, AllocateReportsOutOfMemory) {
  const auto address = driver_->allocate(driver_->memory().value().total + 1_GiB);
  ASSERT_FALSE(address.ok());
  EXPECT_EQ(address.error().code, Errc::kOutOfMemory);
}

TEST_P(DriverContract, CallsOutOfOrderAreInvalidAndHaveNoEffect) {
  const Page page = make_page();
  const HandleId other = create(page_);
  const AddrRange wide = reserve(page_ * 2);
  const HandleId gone = driver_->create(page_).value();
  ASSERT_TRUE(driver_->release(gone).ok());
  const auto is_refused = [](const auto& result) {
    return error_of(result) == Errc::kInvalidArgument;
  };
  EXPECT_TRUE(is_refused(driver_->release(page.handle)));  // still mapped
  EXPECT_TRUE(is_refused(driver_->release(gone)));
  EXPECT_TRUE(is_refused(driver_->release(HandleId{})));
  EXPECT_TRUE(is_refused(driver_->unreserve(page.range)));  // still mapped
  EXPECT_TRUE(is_refused(driver_->unreserve({wide.begin, page_})));
  EXPECT_TRUE(is_refused(driver_->map(page.range, other)));  // over a mapping
  EXPECT_TRUE(is_refused(driver_->map({wide.begin, page_}, gone)));
  EXPECT_TRUE(is_refused(driver_->map({wide.end(), page_}, other)));  // outside
  EXPECT_TRUE(is_refused(driver_->set_access({wide.begin, page_})));  // nothing there
  EXPECT_TRUE(is_refused(driver_->unmap({wide.begin, page_})));
  EXPECT_TRUE(is_refused(driver_->export_handle(gone)));
  EXPECT_TRUE(is_refused(driver_->allocate(0_B)));
  EXPECT_TRUE(is_refused(driver_->free(DeviceAddr{512})));
  device_->forget_complaints();
  device_->fill(main_, page.range, 4);
  device_->check(main_, page.range, 4);
}

TEST_P(DriverContract, EveryCallWorksFromAThreadThatNeverUsedTheDevice) {
  std::thread([&] {
    const AddrRange range = driver_->reserve(page_, page_).value();
    const HandleId handle = driver_->create(page_).value();
    EXPECT_TRUE(driver_->map(range, handle).ok());
    EXPECT_TRUE(driver_->set_access(range).ok());
    const EventId event = driver_->record(main_).value();
    EXPECT_TRUE(driver_->wait(event).ok());
    EXPECT_TRUE(driver_->query(event).value());
    driver_->recycle(event);
    EXPECT_TRUE(driver_->unmap(range).ok());
    EXPECT_TRUE(driver_->release(handle).ok());
    EXPECT_TRUE(driver_->unreserve(range).ok());
    const DeviceAddr plain = driver_->allocate(1_KiB).value();
    EXPECT_TRUE(driver_->free(plain).ok());
    EXPECT_TRUE(driver_->memory().ok());
  }).join();
}

// Without this a test's name ends in the address of make(), another one on every run.
std::string name_of(const ::testing::TestParamInfo<Candidate>& info) { return info.param.name; }

constexpr Candidate kSim{"Sim", &make_sim_contract_device};
INSTANTIATE_TEST_SUITE_P(Simulated, DriverContract, ::testing::Values(kSim), name_of);

#ifdef GPUMEMX_HAVE_CUDA_DRIVER
constexpr Candidate kCuda{"Cuda", &make_cuda_contract_device};
INSTANTIATE_TEST_SUITE_P(Device, DriverContract, ::testing::Values(kCuda), name_of);
#endif

}  // namespace
}  // namespace gpumemx
