// SPDX-License-Identifier: BSD-3-Clause
//
// One fixed program, run with its first, its second, its third ... driver call failing until none
// does. Whichever call it is: the books stay intact, the same request asked again is served, and in
// the end nothing is left on the device.
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

class ShortProgram {
 public:
  struct Block {
    DeviceAddr address;
    Bytes size;
    StreamInfo stream;
    std::uint64_t tag = 0;
  };

  ShortProgram(const Options& options, std::uint64_t fails) : gpu_(device()) {
    gpu_.set_manual(true);
    one_ = {gpu_.new_stream(), true};
    two_ = {gpu_.new_stream(), true};
    temporary_ = {gpu_.new_stream(), false};
    if (fails != 0) gpu_.fail_nth_any(fails);
    allocator_ = std::make_unique<DeviceAllocator>(gpu_, options);
  }

  // What is wrong, or "".
  std::string run() {
    grow_and_harvest();
    exchange();
    alternate();
    fill_up();
    graph();
    plain_pool();
    temporary_stream();
    trim();
    finish();
    return wrong_;
  }
  std::uint64_t fired() const { return gpu_.faults_fired(); }
  const PathCounts& paths() const { return paths_; }

 private:
  static SimOptions device() {
    SimOptions options;
    options.capacity = 160_MiB;
    return options;
  }

  void expect(bool holds, const std::string& what) {
    if (!holds && wrong_.empty()) wrong_ = what;
  }
  void check(const std::string& when) {
    const auto broken = allocator_->validate();
    expect(!broken, when + ": " + broken.value_or(""));
    const auto reserved = allocator_->stats().reserved_bytes.all().current;
    expect(static_cast<std::uint64_t>(reserved) == gpu_.reserved_bytes().n,
           when + ": reserved_bytes is not the device's");
    if (gpu_.hazard_count() != 0) expect(false, when + ": " + gpu_.hazards().front());
  }

  // One failure may fail one request, not the next.
  Block get(Bytes size, const StreamInfo& stream, PoolId pool = kDefaultPool) {
    for (int tries = 0; tries < 2; ++tries) {
      const std::uint64_t before = gpu_.faults_fired();
      AllocRequest request;
      request.size = size;
      request.stream = stream;
      request.pool = pool;
      const AllocResult result = allocator_->allocate(request);
      check("allocate");
      if (result.ok()) {
        Block b{result.address, result.size, stream, ++last_tag_};
        gpu_.launch(stream.ref, {writes({b.address, b.size}, b.tag)});
        return b;
      }
      expect(gpu_.faults_fired() != before,
             "a request failed without a reason: " + result.failure->text());
    }
    expect(false, "a request was not served when asked again");
    return {};
  }
  void read(const Block& b, const StreamInfo& stream) {
    if (b.size.n != 0) gpu_.launch(stream.ref, {reads({b.address, b.size}, b.tag)});
  }
  void put(const Block& b) {
    if (b.size.n == 0) return;
    read(b, b.stream);
    allocator_->free(b.address);
    check("free");
  }
  void put(std::vector<Block>& blocks) {
    for (const Block& b : blocks) put(b);
    blocks.clear();
  }

  void grow_and_harvest() {
    std::vector<Block> blocks;
    for (const Bytes size : {1_MiB, 5_MiB, 12_MiB, 700_KiB, 9_MiB})
      blocks.push_back(get(size, one_));
    const Block stays = get(3_MiB, one_);
    put(blocks);
    blocks.push_back(get(21_MiB, one_));  // its own handles, moved before the work on them is done
    blocks.push_back(get(10_MiB, one_));
    put(blocks);
    gpu_.complete_all();
    blocks.push_back(get(24_MiB, two_));  // and those of the other stream, done by now
    put(blocks);
    put(stays);
  }

  void exchange() {
    const Block b = get(6_MiB, one_);
    if (b.size.n == 0) return;
    for (int tries = 0; tries < 2; ++tries) {
      const auto event = gpu_.record(one_.ref);
      if (!event.ok()) continue;
      gpu_.stream_wait(two_.ref, event.value());
      gpu_.recycle(event.value());
      expect(allocator_->record_stream(b.address, two_), "record_stream() of a live block");
      read(b, two_);
      break;
    }
    put(b);
    const Block other = get(6_MiB, one_);
    gpu_.complete_all();
    put(other);
    put(get(1_KiB, one_));  // finds the pending block complete
  }

  void alternate() {
    for (int round = 0; round < 6; ++round) {
      std::vector<Block> blocks;
      for (const Bytes size : round % 2 == 0 ? std::vector<Bytes>{18_MiB, 7_MiB, 5_MiB}
                                             : std::vector<Bytes>{9_MiB, 14_MiB, 11_MiB}) {
        blocks.push_back(get(size, round % 3 == 2 ? two_ : one_));
      }
      put(blocks);
      if (round % 2 == 1) gpu_.complete_all();
      (void)allocator_->maintain();
    }
  }

  void fill_up() {
    std::vector<Block> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(get(34_MiB, one_));
    put(blocks);
    gpu_.complete_all();
    for (int i = 0; i < 12; ++i)
      blocks.push_back(get(3_MiB + 512_KiB * static_cast<std::uint64_t>(i), two_));
    put(blocks);  // not complete: the next ones wait
    for (int i = 0; i < 3; ++i) blocks.push_back(get(44_MiB, one_));
    put(blocks);
    gpu_.complete_all();
    (void)allocator_->maintain();
  }

  void graph() {
    gpu_.complete_all();
    // Plain memory can't be given back during a capture. Twice: the first may fail.
    for (int i = 0; i < 2; ++i) (void)allocator_->trim({});
    const PoolId pool = allocator_->create_pool({});
    allocator_->begin_capture();
    gpu_.begin_capture(one_.ref, CaptureMode::kGlobal);
    const Block inside = get(8_MiB, one_, pool);
    const Block kept = get(4_MiB, one_, pool);
    put(inside);
    put(get(8_MiB, one_, pool));
    const Block outside = get(13_MiB, two_);  // a miss while another stream captures
    read(kept, one_);
    const auto captured = gpu_.end_capture(one_.ref);
    expect(captured.ok(), "the capture was ended by a forbidden call");
    allocator_->end_capture();
    for (const StreamInfo& stream : {one_, one_}) {
      if (!captured.ok()) break;
      gpu_.replay_graph(captured.value(), stream.ref);
      read(kept, stream);
      put(get(6_MiB, two_));
    }
    if (captured.ok()) gpu_.destroy_graph(captured.value());
    put(kept);
    put(outside);
    allocator_->release_pool(pool);
    put(get(30_MiB, two_));  // while the last replay is still queued
    gpu_.complete_all();
    put(get(40_MiB, two_));
    check("graph");
  }

  void plain_pool() {
    const PoolId pool = allocator_->create_pool({true});
    std::vector<Block> blocks;
    for (const Bytes size : {512_KiB, 3_MiB, 15_MiB}) blocks.push_back(get(size, one_, pool));
    put(blocks);
    allocator_->release_pool(pool);
    gpu_.complete_all();
    put(get(20_MiB, one_));
  }

  void temporary_stream() {
    std::vector<Block> blocks;
    for (const Bytes size : {2_MiB, 6_MiB}) blocks.push_back(get(size, temporary_));
    if (blocks[0].size.n != 0) {
      expect(allocator_->record_stream(blocks[0].address, one_), "record_stream() of a live block");
    }
    put(blocks);
    gpu_.destroy_stream(temporary_.ref);
    allocator_->begin_capture();
    allocator_->end_capture();
    gpu_.complete(temporary_.ref);
    put(get(50_MiB, one_));
  }

  void trim() {
    const Block stays = get(5_MiB, one_);
    put(get(17_MiB, one_));
    TrimRequest request;
    request.target = 20_MiB;
    (void)allocator_->trim(request);
    check("trim");
    request.target = {};
    (void)allocator_->trim(request);
    check("trim");
    put(stays);
  }

  void finish() {
    gpu_.complete_all();
    (void)allocator_->trim({});
    check("the end");
    paths_ = allocator_->stats().paths;
    allocator_.reset();
    if (gpu_.hazard_count() != 0) expect(false, "the end: " + gpu_.hazards().front());
    expect(gpu_.empty(), "something was left on the device");
  }

  SimDriver gpu_;
  std::unique_ptr<DeviceAllocator> allocator_;
  StreamInfo one_, two_, temporary_;
  std::uint64_t last_tag_ = 0;
  std::string wrong_;
  PathCounts paths_;
};

// Returns how many calls there were to fail.
std::uint64_t fail_each(const Options& options) {
  for (std::uint64_t n = 1;; ++n) {
    ShortProgram program(options, n);
    EXPECT_EQ(program.run(), "") << "with driver call " << n << " failing";
    if (program.fired() == 0 || ::testing::Test::HasFailure()) return n - 1;
  }
}

TEST(FailingCalls, TheProgramTakesEveryWay) {
  ShortProgram program({}, 0);
  ASSERT_EQ(program.run(), "");
  const PathCounts& p = program.paths();
  EXPECT_GT(p.created, 0u);
  EXPECT_GT(p.harvested_own, 0u);
  EXPECT_GT(p.harvested_other, 0u);
  EXPECT_GT(p.alias_switches, 0u);
  EXPECT_GT(p.repointed, 0u);
  EXPECT_GT(p.recut, 0u);
  EXPECT_GT(p.late_retired, 0u);
  EXPECT_GT(p.waits, 0u);
  EXPECT_GT(p.private_blocks, 0u);
  EXPECT_GT(p.plain_segments, 0u);
}

TEST(FailingCalls, LeaveTheStateIntactWhicheverItIs) {
  const std::uint64_t calls = fail_each({});
  std::printf("each of %llu driver calls failed once\n", static_cast<unsigned long long>(calls));
  EXPECT_GT(calls, 200u);
}

TEST(FailingCalls, LeaveTheStateIntactWithBackgroundWork) {
  Options options;
  options.background = true;
  options.max_aliases = 2;
  options.slack = 0.1;
  EXPECT_GT(fail_each(options), 200u);
}

TEST(FailingCalls, LeaveTheStateIntactInPlainMode) {
  Options options;
  options.plain = true;
  EXPECT_GT(fail_each(options), 50u);
}

}  // namespace
}  // namespace gpumemx
