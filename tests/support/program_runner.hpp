// SPDX-License-Identifier: BSD-3-Clause
//
// Carries out a random program (programs.hpp) on a DeviceAllocator over the simulated device,
// beside a model too simple to be wrong: the table of live blocks and the tag that each must hold.
//
// The program keeps the contract of a stream-ordered allocator and nothing more: a block is written
// on its stream as soon as it is handed out, it is freed while that work is still queued, and work
// of other streams is ordered by events or announced with record_stream(). What is wrong shows as a
// hazard of the device, as a property that does not hold, or as an abort.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/allocator.hpp"
#include "driver/meter.hpp"
#include "driver/sim/sim_driver.hpp"
#include "support/programs.hpp"

namespace gpumemx {

struct Broken {
  std::size_t op = 0;
  std::string what;
};

// Called by the history under the allocator's lock; see Op::kFreeElsewhere.
inline std::atomic<const std::function<void()>*> call_inside_the_books{nullptr};
inline std::int64_t clock_that_calls() {
  if (const auto* f = call_inside_the_books.exchange(nullptr)) (*f)();
  return 0;
}

class ProgramRunner {
 public:
  // `thorough`: validate after every operation, to find the one that breaks something.
  explicit ProgramRunner(const Program& program, bool thorough = false)
      : program_(program), thorough_(thorough), gpu_(program.device) {}

  // The first thing that is wrong, or nothing.
  std::optional<Broken> run() {
    if (!program_.lags) gpu_.set_manual(true);
    allocator_ = std::make_unique<DeviceAllocator>(gpu_, program_.options);
    for (std::uint64_t i = 0; i < program_.streams; ++i) add_stream(true);
    for (at_ = 0; at_ < program_.ops.size() && !broken_; ++at_) {
      step(program_.ops[at_]);
      if (broken_) break;
      if (gpu_.hazard_count() != 0) {
        fail("hazard: " + gpu_.hazards().front());
      } else if (thorough_ || at_ % 256 == 255) {
        check_everything();
      }
    }
    if (!broken_) finish();
    if (broken_)
      allocator_->shut_down();  // nothing is sure any more: it only frees its own records
    return broken_;
  }

  // Where run() is; readable from a signal handler.
  std::size_t position() const { return at_; }
  const PathCounts& paths() const { return paths_; }
  std::uint64_t ooms() const { return ooms_; }

 private:
  struct Stream {
    StreamRef ref;
    bool permanent = true;
    bool alive = true;
    bool capturing = false;
    int users = 0;  // live blocks that belong to it or are recorded on it
  };
  struct Block {
    DeviceAddr address;
    Bytes size, requested;
    std::size_t stream = 0;
    std::uint64_t tag = 0;
    std::size_t cursor = 0;             // the stream that used it last; all uses are in order
    std::vector<std::size_t> recorded;  // streams
    bool only_read = false;             // a stream reads it that is not the cursor
    std::optional<std::size_t> pool;
    AddrRange range() const { return {address, requested.n == 0 ? Bytes{1} : requested}; }
    AddrRange whole() const { return {address, size}; }
  };
  struct Graph {
    GraphId id{};
    std::vector<Block> outputs;  // still live
  };
  // A third party with device memory of its own.
  class Source final : public SegmentSource {
   public:
    explicit Source(SimDriver& gpu) : gpu_(gpu) {}
    Result<DeviceAddr> allocate(Bytes size) override { return gpu_.allocate(size); }
    void free(DeviceAddr address) override {
      while (!gpu_.free(address).ok()) {  // it may be this call that is to fail
      }
    }

   private:
    SimDriver& gpu_;
  };
  struct Checkpoint {
    PoolCheckpoint core;
    std::vector<Block> blocks;
  };
  struct Pool {
    PoolId id{};
    bool whole = false;
    bool lends = false;  // to others who are out of memory
    std::optional<Checkpoint> checkpoint;
    bool graphs_only = false;
    bool released = false;
    bool capturing = false;
    std::optional<std::size_t> cursor;  // the stream of the last replay; replays are in order
    std::vector<Graph> graphs;
  };
  struct Capture {
    std::size_t stream = 0, pool = 0;
    std::vector<Block> blocks;
    bool launched = false;
  };

  void fail(std::string what) {
    if (!broken_) broken_ = Broken{at_, std::move(what)};
  }

  // --- choosing among what there is

  template <class Pred>
  std::optional<std::size_t> pick_stream(std::uint64_t number, Pred pred) const {
    std::size_t count = 0;
    for (const Stream& s : streams_) count += pred(s) ? 1 : 0;
    if (count == 0) return std::nullopt;
    std::size_t nth = static_cast<std::size_t>(number % count);
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      if (pred(streams_[i]) && nth-- == 0) return i;
    }
    return std::nullopt;
  }
  static bool usable(const Stream& s) { return s.alive && !s.capturing; }
  bool usable(std::size_t stream) const { return usable(streams_[stream]); }

  template <class Pred>
  std::optional<std::size_t> pick_pool(std::uint64_t number, Pred pred) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < pools_.size(); ++i) {
      if (pred(pools_[i])) found.push_back(i);
    }
    if (found.empty()) return std::nullopt;
    return found[static_cast<std::size_t>(number % found.size())];
  }
  std::optional<std::size_t> pick_capture(std::uint64_t number) const {
    if (captures_.empty()) return std::nullopt;
    return static_cast<std::size_t>(number % captures_.size());
  }
  // ~0 is the newest.
  std::optional<std::size_t> pick_block(std::uint64_t number) const {
    if (live_.empty()) return std::nullopt;
    return number == ~0ull ? live_.size() - 1 : static_cast<std::size_t>(number % live_.size());
  }

  // --- streams and work

  std::size_t add_stream(bool permanent) {
    std::size_t at = 0;
    while (at < streams_.size() && streams_[at].alive) ++at;
    if (at == streams_.size()) streams_.emplace_back();
    streams_[at] = {gpu_.new_stream(), permanent, true, false, 0};
    if (program_.lags) {
      gpu_.set_lag_us(streams_[at].ref, static_cast<std::int64_t>(next_number() % 3000));
    }
    return at;
  }
  StreamInfo info(std::size_t stream) const {
    return {streams_[stream].ref, streams_[stream].permanent, streams_[stream].capturing};
  }
  // A pseudo-random number that depends only on how far the program is.
  std::uint64_t next_number() {
    numbers_ += 0x9E3779B97F4A7C15ull;
    std::uint64_t x = numbers_ ^ (program_.seed << 17);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  // What is queued on `to` from here on runs after what is queued on `from` now.
  bool order(std::size_t from, std::size_t to) {
    if (from == to) return true;
    if (!usable(from) || !usable(to)) return false;
    for (int tries = 0; tries < 3; ++tries) {
      const auto event = gpu_.record(streams_[from].ref);  // it may be this call that is to fail
      if (!event.ok()) continue;
      gpu_.stream_wait(streams_[to].ref, event.value());
      gpu_.recycle(event.value());
      return true;
    }
    return false;
  }
  bool move_to(Block& b, std::size_t stream) {
    if (!order(b.cursor, stream) || !usable(stream)) return false;
    b.cursor = stream;
    return true;
  }
  void write(Block& b, std::size_t stream) {
    b.tag = ++last_tag_;
    gpu_.launch(streams_[stream].ref, {writes(b.range(), b.tag)});
  }
  void read(const Block& b, std::size_t stream) {
    gpu_.launch(streams_[stream].ref, {reads(b.range(), b.tag)});
  }
  void read_and_write(Block& b, std::size_t stream) {
    const std::uint64_t old = b.tag;
    b.tag = ++last_tag_;
    gpu_.launch(streams_[stream].ref, {reads(b.range(), old), writes(b.range(), b.tag)});
  }
  void use(Block& b, std::size_t stream, std::uint64_t how) {
    if (b.only_read || how % 4 < 2) return read(b, stream);
    how % 4 == 2 ? write(b, stream) : read_and_write(b, stream);
  }

  // --- allocation

  std::optional<Block> allocate(Bytes size, std::size_t stream, std::optional<std::size_t> pool) {
    AllocRequest request;
    request.size = size;
    request.stream = info(stream);
    if (pool) request.pool = pools_[*pool].id;
    request.tag = ++last_tag_;
    const std::uint64_t fired = gpu_.faults_fired();
    const AllocResult result = allocator_->allocate(request);
    if (!result.ok()) {
      ++ooms_;
      check_verdict(*result.failure, request, gpu_.faults_fired() != fired);
      last_oom_ = result.failure->cause;
      return std::nullopt;
    }
    Block b;
    b.address = result.address;
    b.size = result.size;
    b.requested = size;
    b.stream = b.cursor = stream;
    b.pool = pool;
    const bool whole = allocator_->find_block(b.address)->segment == b.address &&
                       b.size.n % kPage.n == 0 && b.size > block_size(size);
    if (b.size != block_size(size) && !whole) fail("a block does not have the rounded size");
    if (b.address.n % kGranule.n != 0) fail("a block is not aligned");
    const auto next = ranges_.lower_bound(b.address);
    if (next != ranges_.end() && next->first < b.address + b.size) {
      fail("two live blocks overlap: " + describe(b.whole()) + " and the one at " +
           describe(next->first));
    }
    if (next != ranges_.begin()) {
      const auto before = std::prev(next);
      if (before->second.end() > b.address) {
        fail("two live blocks overlap: " + describe(b.whole()) + " and " +
             describe(before->second));
      }
    }
    ranges_.emplace_hint(next, b.address, b.whole());
    live_bytes_ += b.size;
    requested_bytes_ += b.requested;
    ++streams_[stream].users;
    return b;
  }

  // The books of the model. The caller then calls free().
  void forget(const Block& b) {
    ranges_.erase(b.address);
    live_bytes_ -= b.size;
    requested_bytes_ -= b.requested;
    --streams_[b.stream].users;
    for (const std::size_t s : b.recorded) --streams_[s].users;
  }
  void free(const Block& b) {
    forget(b);
    allocator_->free(b.address);
  }
  void record(Block& b, std::size_t stream) {
    if (!allocator_->record_stream(b.address, info(stream)))
      fail("record_stream() of a live block");
    if (stream == b.stream) return;
    if (std::find(b.recorded.begin(), b.recorded.end(), stream) != b.recorded.end()) return;
    b.recorded.push_back(stream);
    ++streams_[stream].users;
  }
  void free_at(std::size_t index, std::uint64_t how) {
    Block b = std::move(live_[index]);
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
    if (how % 4 != 0 && usable(b.cursor)) read(b, b.cursor);
    free(b);
  }

  void do_alloc(const Op& op) {
    relieve(op.c >> 16);
    const auto stream = pick_stream(op.b, [](const Stream& s) { return usable(s); });
    if (!stream) return;
    std::optional<std::size_t> pool;
    if (op.c & 1) {
      pool = pick_pool(op.c >> 8, [](const Pool& p) { return !p.graphs_only && !p.released; });
    }
    const bool may_exceed = (op.c >> 56) < 16;
    while (!may_exceed && !live_.empty() && live_bytes_ + Bytes{op.a} > program_.most_live) {
      free_at(static_cast<std::size_t>(next_number() % live_.size()), next_number());
    }
    if (auto b = allocate({op.a}, *stream, pool)) {
      write(*b, *stream);
      live_.push_back(std::move(*b));
    }
  }

  // What a program does some time after it ran out of memory: else a long one fills up with pools
  // and with captures that go on and on, and finds nothing new.
  void relieve(std::uint64_t number) {
    if (!last_oom_ || number % 8 != 0) return;
    const OomCause cause = *std::exchange(last_oom_, std::nullopt);
    if (cause == OomCause::kDuringCapture) {
      if (!captures_.empty()) end_capture(0);
    } else if (cause == OomCause::kHeldByPools || cause == OomCause::kFragmented ||
               cause == OomCause::kFull) {
      do_drop_graphs({Op::kDropGraphs, number >> 8, number >> 16, 0});
      if (number % 16 == 0) do_release_pool({Op::kReleasePool, number >> 8, number >> 16, 0});
      free_orphans();
    }
  }

  void do_free(const Op& op) {
    if (live_.empty()) return;
    const std::size_t index = op.a % 3 == 0   ? live_.size() - 1
                              : op.a % 3 == 1 ? 0
                                              : static_cast<std::size_t>(op.b % live_.size());
    free_at(index, op.c);
  }

  void do_cross(const Op& op) {
    const auto index = pick_block(op.a);
    if (!index) return;
    Block& b = live_[*index];
    const auto other = pick_stream(op.b, [](const Stream& s) { return usable(s); });
    if (!other || !usable(b.stream) || !usable(b.cursor)) return;
    switch (op.c % 8) {
      case 0: record(b, *other); break;  // announced, never used
      case 1:
      case 2:
      case 3:  // announced; the block's own stream knows nothing of that work
        record(b, *other);
        if (!b.only_read && move_to(b, *other)) use(b, *other, op.c >> 8);
        break;
      case 4:  // and on a third
        record(b, *other);
        if (!b.only_read && move_to(b, *other)) use(b, *other, op.c >> 8);
        if (const auto third = pick_stream(op.c >> 32, [](const Stream& s) { return usable(s); });
            third && !b.only_read && order(b.cursor, *third)) {
          record(b, *third);
          b.cursor = *third;
          use(b, *third, op.c >> 16);
        }
        break;
      case 5:  // both read it, in whatever order
        record(b, *other);
        if (order(b.cursor, *other)) {
          b.only_read = true;
          read(b, *other);
        }
        break;
      default: {  // not announced, but its own stream waits for it
        const std::size_t own = b.stream;
        if (b.only_read || *other == own || !move_to(b, *other)) break;
        use(b, *other, op.c >> 8);
        if (!move_to(b, own)) record(b, *other);
        break;
      }
    }
  }

  void do_use(const Op& op) {
    const auto index = pick_block(op.a);
    if (!index) return;
    Block& b = live_[*index];
    if (usable(b.stream) && move_to(b, b.stream)) use(b, b.stream, op.c);
  }

  // A free that respects the lock can't end while another thread is in the books. The other thread
  // gets the chance: the history's clock, called under the lock, waits for it a moment.
  void do_free_elsewhere(const Op& op) {
    const auto index = pick_block(op.a);
    const auto stream = pick_stream(op.c, [](const Stream& s) { return usable(s); });
    if (!index || !stream) return;
    const Block victim = std::move(live_[*index]);
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(*index));
    forget(victim);
    std::thread other;
    std::mutex mu;
    std::condition_variable ended;
    bool is_done = false, slipped_in = false;
    const std::function<void()> inside = [&] {
      other = std::thread([&] {
        allocator_->free(victim.address);
        const std::lock_guard lock(mu);
        is_done = true;
        ended.notify_all();
      });
      std::unique_lock lock(mu);
      slipped_in = ended.wait_for(lock, std::chrono::milliseconds(2), [&] { return is_done; });
    };
    allocator_->record_history(16, &clock_that_calls);
    call_inside_the_books.store(&inside);
    is_racing_ = true;
    auto b = allocate({op.b}, *stream, std::nullopt);  // its first event calls inside()
    is_racing_ = false;
    call_inside_the_books.store(nullptr);
    if (other.joinable()) {
      other.join();
    } else {
      allocator_->free(victim.address);
    }
    allocator_->record_history(0);
    if (slipped_in) fail("a free went on while another thread was in the books");
    if (b) {
      write(*b, *stream);
      live_.push_back(std::move(*b));
    }
  }

  // --- graphs and pools

  void do_begin_capture(const Op& op) {
    if (captures_.size() >= 2) return;
    const auto stream = pick_stream(op.a, [](const Stream& s) { return usable(s); });
    if (!stream) return;
    std::optional<std::size_t> pool;
    if (op.b % 3 == 0) {
      pool = pick_pool(op.b >> 8,
                       [](const Pool& p) { return p.graphs_only && !p.released && !p.capturing; });
    }
    if (!pool) pool = add_pool(true, {});
    allocator_->begin_capture();
    gpu_.begin_capture(streams_[*stream].ref,
                       op.c % 4 == 0 ? CaptureMode::kThreadLocal : CaptureMode::kGlobal);
    streams_[*stream].capturing = true;
    ++streams_[*stream].users;
    pools_[*pool].capturing = true;
    captures_.push_back({*stream, *pool, {}, false});
  }

  std::size_t add_pool(bool graphs_only, PoolOptions options) {
    std::size_t at = 0;
    while (at < pools_.size() && !pools_[at].released) ++at;
    if (at == pools_.size()) pools_.emplace_back();
    pools_[at] = Pool{};
    pools_[at].id = allocator_->create_pool(options);
    pools_[at].graphs_only = graphs_only;
    return at;
  }

  void do_graph_alloc(const Op& op) {
    const auto index = pick_capture(op.b);
    if (!index) return;
    Capture& capture = captures_[*index];
    if (auto b = allocate({op.a}, capture.stream, capture.pool)) {
      write(*b, capture.stream);
      capture.blocks.push_back(std::move(*b));
    }
  }
  void do_graph_free(const Op& op) {
    const auto index = pick_capture(op.b);
    if (!index || captures_[*index].blocks.empty()) return;
    auto& blocks = captures_[*index].blocks;
    const auto at = static_cast<std::ptrdiff_t>(op.a % blocks.size());
    Block b = std::move(blocks[static_cast<std::size_t>(at)]);
    blocks.erase(blocks.begin() + at);
    if (op.c % 4 != 0) read(b, captures_[*index].stream);
    if (op.c % 16 == 5) {
      if (const auto other = pick_stream(op.c >> 8, [](const Stream& s) { return usable(s); })) {
        record(b, *other);
      }
    }
    free(b);
  }
  void do_graph_use(const Op& op) {
    const auto index = pick_capture(op.b);
    if (!index || captures_[*index].blocks.empty()) return;
    Capture& capture = captures_[*index];
    use(capture.blocks[static_cast<std::size_t>(op.a % capture.blocks.size())], capture.stream,
        op.c);
  }
  void do_end_capture(const Op& op) {
    if (const auto index = pick_capture(op.a)) end_capture(*index);
  }
  void end_capture(std::size_t index) {
    Capture capture = std::move(captures_[index]);
    captures_.erase(captures_.begin() + static_cast<std::ptrdiff_t>(index));
    for (const Block& b : capture.blocks) read(b, capture.stream);
    const auto graph = gpu_.end_capture(streams_[capture.stream].ref);
    streams_[capture.stream].capturing = false;
    --streams_[capture.stream].users;
    Pool& pool = pools_[capture.pool];
    pool.capturing = false;
    allocator_->end_capture();
    if (!graph.ok()) return fail("a capture was ended by a forbidden call");
    pool.graphs.push_back({graph.value(), std::move(capture.blocks)});
  }

  void do_replay(const Op& op) {
    const auto pool = pick_pool(op.a, [](const Pool& p) { return !p.graphs.empty(); });
    const auto stream = pick_stream(op.b, [](const Stream& s) { return usable(s) && s.permanent; });
    if (!pool || !stream) return;
    Pool& p = pools_[*pool];
    if (p.cursor && !order(*p.cursor, *stream)) return;
    Graph& graph = p.graphs[static_cast<std::size_t>(op.c % p.graphs.size())];
    know(*stream);
    p.cursor = *stream;
    gpu_.replay_graph(graph.id, streams_[*stream].ref);
    for (const Block& b : graph.outputs) read(b, *stream);
    // Outputs are tensors: some are dropped while the graph lives.
    if ((op.c >> 32) % 16 == 0 && !graph.outputs.empty()) {
      Block b = std::move(graph.outputs.back());
      graph.outputs.pop_back();
      free(b);
    }
  }

  // The allocator waits for the streams that it knows before a pool's memory moves on.
  void know(std::size_t stream) {
    if (known_.size() <= stream) known_.resize(stream + 1);
    if (std::exchange(known_[stream], streams_[stream].ref.id) == streams_[stream].ref.id) return;
    if (auto b = allocate({1}, stream, std::nullopt)) free(*b);
  }

  void do_drop_graphs(const Op& op) {
    const auto pool =
        pick_pool(op.a, [](const Pool& p) { return p.graphs_only && !p.released && !p.capturing; });
    if (!pool) return;
    Pool& p = pools_[*pool];
    std::vector<Block> outputs;
    for (Graph& graph : p.graphs) {
      gpu_.destroy_graph(graph.id);
      for (Block& b : graph.outputs) outputs.push_back(std::move(b));
    }
    p.graphs.clear();
    const bool before = op.b % 3 != 0;
    if (before) {
      for (const Block& b : outputs) free(b);
    }
    release(p);
    if (before) return;
    // Tensors that outlive their graph; what they hold is known only on the stream of the replay.
    for (const Block& b : outputs) orphans_.push_back(b);
    if (op.b % 2 == 0) free_orphans();
  }
  void free_orphans() {
    for (const Block& b : orphans_) free(b);
    orphans_.clear();
  }

  void release(Pool& p) {
    allocator_->release_pool(p.id);
    p.released = true;
  }
  void do_create_pool(const Op& op) {
    if (pools_.size() >= 8) return;
    PoolOptions options;
    options.plain = op.a % 3 == 0;
    options.whole = op.a % 7 == 0;
    if (op.a % 5 == 0) options.source = source_;
    const std::size_t at = add_pool(false, options);
    pools_[at].whole = options.whole;
    pools_[at].lends = op.a % 4 == 0;
    if (pools_[at].lends) allocator_->set_use_on_oom(pools_[at].id, true);
  }

  // Of pools whose blocks are all on streams that stay, and not lent to anybody.
  bool can_have_checkpoints(const Pool& p, std::size_t at) const {
    if (p.graphs_only || p.released || p.lends || p.capturing || !captures_.empty()) return false;
    return std::all_of(live_.begin(), live_.end(), [&](const Block& b) {
      return b.pool != at || streams_[b.stream].permanent;
    });
  }
  void do_checkpoint(const Op& op) {
    const auto at = pick_pool(op.a, [](const Pool& p) { return !p.graphs_only && !p.released; });
    if (!at || !can_have_checkpoints(pools_[*at], *at)) return;
    Checkpoint checkpoint{allocator_->checkpoint_pool(pools_[*at].id), {}};
    for (const Block& b : live_) {
      if (b.pool == at) checkpoint.blocks.push_back(b);
    }
    if (checkpoint.core.live.size() != checkpoint.blocks.size()) {
      fail("a checkpoint does not have the live blocks of its pool");
    }
    pools_[*at].checkpoint = std::move(checkpoint);
  }
  void do_restore(const Op& op) {
    const auto at = pick_pool(op.a, [](const Pool& p) { return !p.released && p.checkpoint; });
    if (!at || !can_have_checkpoints(pools_[*at], *at)) return;
    const Checkpoint& checkpoint = *pools_[*at].checkpoint;
    const auto restored = allocator_->restore_pool(checkpoint.core);
    const bool waited_well = restored.ok() || restored.error().code == Errc::kCaptureActive;
    if (!waited_well) return fail("a checkpoint is refused: " + restored.error().where);
    if (!restored.ok() && gpu_.faults_fired() == 0) return fail("restoring waited for nothing");
    // What was freed is forgotten. What is live again has what others have left in it.
    std::vector<std::size_t> gone;
    for (std::size_t i = 0; i < live_.size(); ++i) {
      if (live_[i].pool != at) continue;
      const auto now = allocator_->find_block(live_[i].address);
      const bool kept =
          std::any_of(checkpoint.blocks.begin(), checkpoint.blocks.end(), [&](const Block& b) {
            return b.address == live_[i].address && b.size == live_[i].size &&
                   b.requested == live_[i].requested;
          });
      if (!kept || !now) gone.push_back(i);
    }
    while (!gone.empty()) {
      forget(live_[gone.back()]);
      live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(gone.back()));
      gone.pop_back();
    }
    if (!restored.ok()) return;
    for (const Block& then : checkpoint.blocks) {
      if (ranges_.count(then.address) != 0) continue;
      Block b = then;
      b.cursor = b.stream;
      b.recorded.clear();
      b.only_read = false;
      ranges_.emplace(b.address, b.whole());
      live_bytes_ += b.size;
      requested_bytes_ += b.requested;
      ++streams_[b.stream].users;
      if (usable(b.stream)) {
        write(b, b.stream);
        live_.push_back(std::move(b));
      } else {
        free(b);
      }
    }
  }

  void do_release_pool(const Op& op) {
    const auto pool = pick_pool(op.a, [](const Pool& p) { return !p.graphs_only && !p.released; });
    if (!pool) return;
    if (op.b % 3 != 0) {  // else its blocks outlive it
      for (std::size_t i = live_.size(); i-- > 0;) {
        if (live_[i].pool == pool) free_at(i, op.b >> 8);
      }
    }
    release(pools_[*pool]);
    // The slot may go to a new pool: blocks that are left belong to none that the model knows.
    for (Block& b : live_) {
      if (b.pool == pool) b.pool.reset();
    }
  }

  // --- the device and the limits

  void do_complete(const Op& op) {
    const std::size_t count = streams_.size() + gone_.size();
    const std::size_t n = static_cast<std::size_t>(op.b % count);
    if (n < streams_.size()) {
      gpu_.complete(streams_[n].ref, op.a);
    } else {
      gpu_.complete(gone_[n - streams_.size()], op.a);
      if (gpu_.queued(gone_[n - streams_.size()]) == 0) {
        gone_.erase(gone_.begin() + static_cast<std::ptrdiff_t>(n - streams_.size()));
      }
    }
  }
  void do_destroy_stream(const Op& op) {
    const auto stream = pick_stream(
        op.a, [](const Stream& s) { return usable(s) && !s.permanent && s.users == 0; });
    if (!stream) return;
    gpu_.destroy_stream(streams_[*stream].ref);  // what is queued on it still runs
    streams_[*stream].alive = false;
    gone_.push_back(streams_[*stream].ref);
  }

  // What the device has given, whether it is on its way back or not.
  static Bytes held(const Stats& s) {
    return Bytes{static_cast<std::uint64_t>(s.reserved_bytes.all().current)} + s.returning_bytes;
  }

  void do_trim(const Op& op) {
    TrimRequest request;
    request.wait = op.a % 2 == 0;
    const std::uint64_t reserved = held(allocator_->stats()).n;
    if (op.a % 5 == 1) request.target = {reserved / 100 * (op.b % 100)};
    const auto pool = pick_pool(op.c, [](const Pool& p) { return p.released; });
    if (op.a % 5 == 2 && pool) request.pool = pools_[*pool].id;
    request.predict = !request.pool && request.target.n == 0;
    check_report();
    const std::uint64_t fired = gpu_.faults_fired();
    const TrimReport r = allocator_->trim(request);
    if (request.predict && r.predicted != r.released && fired == gpu_.faults_fired() &&
        !has_lost_events()) {
      fail("a trim released " + std::to_string(r.released.n) + " bytes and had predicted " +
           std::to_string(r.predicted.n));
    }
    if ((r.released + r.live + r.held + r.pending + r.pools + r.wanted).n != reserved) {
      fail("the parts of a trim's report are not what was reserved");
    }
    const std::uint64_t now = held(allocator_->stats()).n;
    if (now + r.released.n != reserved) fail("a trim did not release what it says");
    if (!request.wait || request.pool || request.target.n != 0 || !captures_.empty() ||
        fired != gpu_.faults_fired()) {
      return;
    }
    if (r.wanted.n != 0)
      fail("a trim of everything kept idle memory: " + std::to_string(r.wanted.n));
    if (r.pending.n != 0 && !has_lost_events()) fail("a trim that waited left memory pending");
  }

  // The parts of each figure are all of it.
  void check_report() {
    const MemoryReport r = allocator_->memory_report();
    const MemoryFigures& f = r.figures;
    const auto sum = [](const auto& shares) {
      Bytes all;
      for (const StreamShare& share : shares) all += share.bytes;
      return all;
    };
    Bytes pools;
    for (const PoolShare& pool : r.pools) pools += pool.reserved;
    if (f.live + f.pending + f.held + f.idle_pending + f.idle_private + f.idle != f.reserved) {
      fail("the parts of the reserved memory are not all of it");
    }
    if (sum(r.pending_on) != f.pending) fail("what is pending is not told by stream");
    if (sum(r.waiting_on) != f.idle_pending) fail("what waits for work is not told by stream");
    if (r.held_by.all() != f.held + f.idle_private) fail("who holds memory is not told of all");
    if (pools != f.in_private_pools) fail("the pools have not what is in pools");
    if (f.live_requested > f.live) fail("more is asked for than live");
    if (r.releasable > r.releasable_by_waiting) fail("waiting would release less");
  }

  void do_fail_nth(const Op& op) {
    if (maps_broken_) return;
    static constexpr DriverCall kCalls[] = {
        DriverCall::kCreate,    DriverCall::kMap,      DriverCall::kSetAccess, DriverCall::kRelease,
        DriverCall::kUnmap,     DriverCall::kAllocate, DriverCall::kFree,      DriverCall::kRecord,
        DriverCall::kQuery,     DriverCall::kMemory,   DriverCall::kCreate,    DriverCall::kMap,
        DriverCall::kSetAccess, DriverCall::kWait};
    // One at a time: a failure on the way back from another loses an address.
    gpu_.clear_failures();
    if (op.a % 64 == 9) return gpu_.lose_next_event();
    const DriverCall call = kCalls[op.a % std::size(kCalls)];
    const bool is_limited = program_.device.max_mappings < 500'000;  // set_access() fails by itself
    if (call != DriverCall::kUnmap || !is_limited) gpu_.fail_nth(call, op.b);
  }

  // Without its event, what a temporary stream freed never gets known as complete.
  bool has_lost_events() const { return gpu_.faults_fired() != 0 && had_temporary_; }

  void step(const Op& op) {
    switch (op.kind) {
      case Op::kAlloc: return do_alloc(op);
      case Op::kFree: return do_free(op);
      case Op::kUse: return do_use(op);
      case Op::kCross: return do_cross(op);
      case Op::kFreeElsewhere: return do_free_elsewhere(op);
      case Op::kComplete: return do_complete(op);
      case Op::kCompleteAll: return gpu_.complete_all();
      case Op::kAdvance: return gpu_.advance_by(static_cast<std::int64_t>(op.a));
      case Op::kTrim: return do_trim(op);
      case Op::kMaintain: return maintain(op);
      case Op::kBeginCapture: return do_begin_capture(op);
      case Op::kGraphAlloc: return do_graph_alloc(op);
      case Op::kGraphFree: return do_graph_free(op);
      case Op::kGraphUse: return do_graph_use(op);
      case Op::kEndCapture: return do_end_capture(op);
      case Op::kReplay: return do_replay(op);
      case Op::kDropGraphs: return do_drop_graphs(op);
      case Op::kCreatePool: return do_create_pool(op);
      case Op::kCheckpoint: return do_checkpoint(op);
      case Op::kRestore: return do_restore(op);
      case Op::kReleasePool: return do_release_pool(op);
      case Op::kCreateStream: {
        std::size_t alive = 0;
        for (const Stream& s : streams_) alive += s.alive ? 1 : 0;
        if (alive < program_.streams + 4) {
          (void)add_stream(false);
          had_temporary_ = true;
        }
        return;
      }
      case Op::kDestroyStream: return do_destroy_stream(op);
      case Op::kFailNth: return do_fail_nth(op);
      case Op::kBreakMaps:
        maps_broken_ = true;
        gpu_.clear_failures();
        return gpu_.fail_always(op.a % 2 == 0 ? DriverCall::kMap : DriverCall::kSetAccess);
      case Op::kMendMaps:
        if (std::exchange(maps_broken_, false)) gpu_.clear_failures();
        return;
      case Op::kOccupy:
        others_ = Bytes{program_.device.capacity.n / 100 * op.a};
        others_ = std::min(others_, program_.device.capacity - gpu_.reserved_bytes());
        return gpu_.occupy(others_);
      case Op::kCap:
        return allocator_->set_cap(op.a >= 1000 ? Bytes{~0ull}
                                                : Bytes{program_.device.capacity.n / 100 * op.a});
      case Op::kResetPeaks:
        if (op.a % 2 == 0)
          allocator_->reset_peaks();
        else
          allocator_->reset_accumulated();
        return;
      case Op::kNonsense: {
        AllocRequest request;
        request.size = {op.a};
        request.stream = info(0);
        const AllocResult result = allocator_->allocate(request);
        if (result.ok()) return fail("a nonsense size was served");
        ++ooms_;
        if (result.failure->device_known && result.failure->cause != OomCause::kNonsenseSize) {
          fail(std::string("a nonsense size failed as: ") + to_string(result.failure->cause));
        }
        return;
      }
      case Op::kHistory: return allocator_->record_history(static_cast<std::size_t>(op.a));
      case Op::kCheck: return check_everything();
    }
  }

  void maintain(const Op& op) {
    if (op.b % 8 == 0) {
      const auto marked = allocator_->give_back_later();
      if (marked && allocator_->returning() != *marked)
        fail("not all that was marked is returning");
    }
    const CallerRoleScope background(CallerRole::kBackground);
    for (std::uint64_t n = op.a % 8 + 1; n > 0; --n) {
      if (!allocator_->maintain(/*release_returning=*/op.b % 2 == 0)) break;
    }
  }

  // --- what must hold

  void check_verdict(const OomVerdict& v, const AllocRequest& request, bool something_failed) {
    const auto text = [&] {
      return " (block " + std::to_string(v.block.n) + ", cause " + to_string(v.cause) +
             ", reserved " + std::to_string(v.reserved.n) + ", live " + std::to_string(v.live.n) +
             ", pending " + std::to_string(v.pending.n) + ", held " + std::to_string(v.held.n) +
             ", idle_pending " + std::to_string(v.idle_pending.n) + ", idle_private " +
             std::to_string(v.idle_private.n) + ", idle " + std::to_string(v.idle.n) + ", free " +
             std::to_string(v.device_free.n) + ", cap " + std::to_string(v.cap.n) + ", said " +
             v.driver_said + ")";
    };
    if ((v.live + v.pending + v.held + v.idle_pending + v.idle_private + v.idle) != v.reserved) {
      return fail("the parts of an OOM verdict are not what is reserved" + text());
    }
    if (v.reserved != gpu_.reserved_bytes()) {
      return fail("an OOM verdict's reserved is not the device's: " +
                  std::to_string(gpu_.reserved_bytes().n) + text());
    }
    if (v.live != live_bytes_ && !is_racing_)
      return fail("an OOM verdict's live is not what is live" + text());
    if (v.device_known && (v.device_total != v.reserved + v.others + v.device_free ||
                           v.device_total != program_.device.capacity || v.others != others_)) {
      return fail("the device's figures of an OOM verdict are wrong" + text());
    }
    if (!v.device_known && !something_failed) return fail("the device was not asked at an OOM");
    if (v.requested != request.size || v.block != block_size(request.size)) {
      return fail("an OOM verdict is about another request");
    }

    // More than the device has is refused at once, without waiting for anything.
    if (v.cause == OomCause::kNonsenseSize) {
      if (v.block <= program_.device.capacity) fail("a size is called nonsense" + text());
      return;
    }

    // Was it justified? Everything that is idle can be moved or replaced in pages, and everything
    // that is complete by waiting was waited for; a block may need a page more at either end.
    const bool is_limited = program_.device.max_mappings < 500'000 || !program_.options.recut;
    if (something_failed || maps_broken_ || is_limited) return;
    if (!captures_.empty() && (v.idle_pending.n != 0 || has_plain())) return;
    const Bytes in_use = v.reserved - v.idle;
    const Bytes by_cap = v.cap > in_use ? v.cap - in_use : Bytes{};
    const Bytes room = std::min(by_cap, v.idle + round_down(v.device_free, kPage));
    if (room >= round_up(v.block, kPage) + kPage * 3) {
      fail("an OOM although enough is idle or free" + text());
    }
    if (captures_.empty() && (v.idle_pending.n != 0 || v.pending.n != 0) && !has_lost_events()) {
      fail("an OOM without waiting for all that is pending" + text());
    }
  }
  bool has_plain() const {
    return allocator_->plain_mode() || allocator_->stats().paths.plain_segments != 0;
  }

  void check_everything() {
    if (auto wrong = allocator_->validate()) return fail("validate(): " + *wrong);
    const Stats s = allocator_->stats();
    const auto bytes = [](const StatArray& a) {
      return Bytes{static_cast<std::uint64_t>(a.all().current)};
    };
    if (held(s) != gpu_.reserved_bytes()) {
      return fail("reserved and returning are " + std::to_string(held(s).n) + ", the device says " +
                  std::to_string(gpu_.reserved_bytes().n));
    }
    Bytes pending, pending_requested;
    std::size_t live = 0;
    for (const BlockInfo& b : allocator_->blocks()) {
      if (b.state == BlockState::kPending) {
        pending += b.size;
        pending_requested += b.requested;
      }
      if (b.state != BlockState::kLive) continue;
      ++live;
      const auto mine = ranges_.find(b.address);
      if (mine == ranges_.end() || mine->second.size != b.size) {
        return fail("a live block of the allocator is not one of the program");
      }
    }
    if (live != ranges_.size()) return fail("the allocator lost a live block");
    if (bytes(s.allocation).n != ranges_.size()) return fail("the allocation count is wrong");
    if (bytes(s.allocated_bytes) != live_bytes_) return fail("allocated_bytes is wrong");
    if (bytes(s.active_bytes) != live_bytes_ + pending) return fail("active_bytes is wrong");
    if (bytes(s.requested_bytes) != requested_bytes_ + pending_requested) {
      return fail("requested_bytes is wrong");
    }
  }

  void finish() {
    gpu_.clear_failures();
    maps_broken_ = false;
    while (!captures_.empty() && !broken_) end_capture(captures_.size() - 1);
    const bool frees_all = program_.seed % 3 != 0;
    for (Pool& p : pools_) {
      for (Graph& graph : p.graphs) {
        gpu_.destroy_graph(graph.id);
        for (const Block& b : graph.outputs) free(b);
      }
      p.graphs.clear();
      if (frees_all && !p.released) release(p);
    }
    if (frees_all) {
      free_orphans();
      while (!live_.empty()) free_at(live_.size() - 1, 1);
      while (allocator_->maintain()) {
      }
      TrimRequest everything;
      const TrimReport r = allocator_->trim(everything);
      const auto left = held(allocator_->stats()).n;
      if (left != 0 && !has_lost_events()) {
        fail("trimming left " + std::to_string(left) + " bytes when nothing was live: pending " +
             std::to_string(r.pending.n) + ", pools " + std::to_string(r.pools.n) + ", live " +
             std::to_string(r.live.n) + ", held " + std::to_string(r.held.n) + ", wanted " +
             std::to_string(r.wanted.n));
      }
    }
    gpu_.complete_all();
    check_everything();
    if (gpu_.hazard_count() != 0) fail("hazard: " + gpu_.hazards().front());
    if (broken_) return;
    paths_ = allocator_->stats().paths;
    allocator_.reset();
    if (gpu_.hazard_count() != 0) return fail("hazard at the end: " + gpu_.hazards().front());
    if (gpu_.empty()) return;
    fail("left on the device: " + std::to_string(gpu_.handle_count()) + " handles, " +
         std::to_string(gpu_.mapping_count()) + " mappings, " + std::to_string(gpu_.live_events()) +
         " events");
  }

  const Program& program_;
  const bool thorough_;
  SimDriver gpu_;
  const std::shared_ptr<Source> source_ = std::make_shared<Source>(gpu_);
  std::unique_ptr<DeviceAllocator> allocator_;

  std::size_t at_ = 0;
  std::optional<Broken> broken_;
  PathCounts paths_;
  std::uint64_t ooms_ = 0;
  std::optional<OomCause> last_oom_;  // that nothing was done about yet

  std::vector<Stream> streams_;
  std::vector<StreamRef> gone_;  // destroyed, with work still queued
  std::vector<StreamId> known_;  // by stream
  std::vector<Block> live_;
  std::vector<Block> orphans_;
  std::vector<Pool> pools_;
  std::vector<Capture> captures_;
  std::map<DeviceAddr, AddrRange> ranges_;  // all live blocks, of graphs too
  Bytes live_bytes_, requested_bytes_, others_;
  std::uint64_t last_tag_ = 0, numbers_ = 0;
  bool had_temporary_ = false, maps_broken_ = false, is_racing_ = false;
};

}  // namespace gpumemx
