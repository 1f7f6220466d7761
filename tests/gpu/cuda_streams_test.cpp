// SPDX-License-Identifier: BSD-3-Clause
//
// Streams that are not torch's: they die, their native value comes back, and one native value can
// mean a stream of its own in every thread.
#include <atomic>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "cuda_lab.hpp"

namespace gpumemx {
namespace {

class CudaStreams : public CudaTest {
 protected:
  void start_with_cap(Bytes cap) {
    Options options;
    options.cap = cap;
    start(options);
  }
};

// A stream is destroyed while its work runs; its memory is wanted by another stream and by a new
// one that has its native value.
TEST_F(CudaStreams, MemoryOfADestroyedStreamServesOthersWhenItsWorkIsDone) {
  start_with_cap(512_MiB);
  const StreamInfo other = permanent(lab_->new_stream());
  std::set<StreamId> ids;
  int came_back = 0;
  std::uint32_t seed = 0;
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    const StreamInfo dying = temporary(lab_->new_stream());
    EXPECT_TRUE(ids.insert(dying.ref.id).second) << "the id of a stream came back";
    for (int i = 0; i < 6; ++i) {
      const AddrRange range = allocate(64_MiB, dying);
      lab_->fill(dying.ref, range, ++seed, microseconds(1000));
      lab_->check(dying.ref, range, seed, microseconds(500));
      allocator_->free(range.begin);
    }
    lab_->destroy_stream(dying.ref);

    std::vector<StreamRef> fresh;
    for (int i = 0; i < 200; ++i) {
      fresh.push_back(lab_->new_stream());
      EXPECT_TRUE(ids.insert(fresh.back().id).second) << "the id of a stream came back";
      if (fresh.back().native == dying.ref.native) break;
    }
    if (fresh.back().native == dying.ref.native) ++came_back;
    // Both at once want more than is left: half of it has to come from the dead.
    const AddrRange a = allocate(200_MiB, other);
    lab_->fill(other.ref, a, ++seed);
    lab_->check(other.ref, a, seed, microseconds(200));
    const StreamInfo heir = temporary(fresh.back());
    const AddrRange b = allocate(250_MiB, heir);
    lab_->fill(heir.ref, b, ++seed);
    lab_->check(heir.ref, b, seed, microseconds(200));
    allocator_->free(a.begin);
    allocator_->free(b.begin);
    for (const StreamRef& stream : fresh) lab_->destroy_stream(stream);
  }
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  EXPECT_GE(came_back, kRounds / 2);
  EXPECT_GT(paths().harvested_other, 500u);
  std::printf("  the native value came back in %d of %d rounds\n", came_back, kRounds);
}

// In turn, so that each request needs what the other thread freed, and still uses on its stream.
TEST_F(CudaStreams, PerThreadDefaultStreamsExchangeMemory) {
  start_with_cap(128_MiB);
  constexpr int kRounds = 60;
  std::promise<StreamRef> ids[2];
  std::future<StreamRef> told[2] = {ids[0].get_future(), ids[1].get_future()};
  std::atomic<int> turn{0};
  const auto work = [&](int me) {
    const StreamInfo mine = temporary(lab_->thread_stream());
    ids[me].set_value(mine.ref);
    for (int round = 0; round < kRounds; ++round) {
      while (turn % 2 != me) std::this_thread::yield();
      const auto seed = static_cast<std::uint32_t>(1000 * me + round + 1);
      const AddrRange range =
          allocate(100_MiB + 2_MiB * static_cast<std::uint64_t>(round % 7), mine);
      lab_->fill(mine.ref, range, seed, microseconds(300));
      lab_->check(mine.ref, range, seed, microseconds(round % 5 == 0 ? 5000 : 300));
      allocator_->free(range.begin);
      ++turn;
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  const StreamRef a = told[0].get(), b = told[1].get();
  EXPECT_EQ(a.native, b.native);
  EXPECT_NE(static_cast<std::uint64_t>(a.id), static_cast<std::uint64_t>(b.id));
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  EXPECT_GT(paths().harvested_other, 5u);
  EXPECT_GT(paths().alias_switches, 100u);
  EXPECT_GT(paths().waits, 20u);
}

// A block of one thread's default stream is freed by another thread, whose own default stream has
// the same native value: an event recorded there says nothing about the first.
TEST_F(CudaStreams, APerThreadStreamIsNotTakenForAnotherThreads) {
  start_with_cap(320_MiB);
  AddrRange used, last;
  std::promise<void> queued, go_on, freed, end;
  std::thread owner([&] {
    const StreamInfo theirs = temporary(lab_->thread_stream());
    used = allocate(128_MiB, theirs);
    last = allocate(32_MiB, theirs);
    lab_->fill(theirs.ref, used, 1);
    lab_->check(theirs.ref, used, 1, microseconds(300'000));
    queued.set_value();
    go_on.get_future().wait();
    allocator_->free(last.begin);
    freed.set_value();
    end.get_future().wait();
  });
  queued.get_future().wait();
  const StreamInfo mine = temporary(lab_->thread_stream());
  allocator_->free(used.begin);
  lab_->synchronize(mine.ref);
  const AddrRange first = allocate(128_MiB, mine);
  lab_->fill(mine.ref, first, 2);
  lab_->check(mine.ref, first, 2);
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  EXPECT_EQ(paths().harvested_other, 0u);

  // The owner's next free says how far its stream is, for all that was freed there.
  go_on.set_value();
  freed.get_future().wait();
  const AddrRange second = allocate(160_MiB, mine);
  lab_->fill(mine.ref, second, 3);
  lab_->check(mine.ref, second, 3);
  EXPECT_EQ(lab_->wrong_words(), 0u) << lab_->complaints();
  EXPECT_GT(paths().harvested_other, 0u);
  end.set_value();
  owner.join();
  allocator_->free(first.begin);
  allocator_->free(second.begin);
}

}  // namespace
}  // namespace gpumemx
