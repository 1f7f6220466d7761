// SPDX-License-Identifier: BSD-3-Clause
//
// The streams of a simulated device, the work queued on them, the clock, and events.
//
// Each stream is a queue that runs in order. What stands in it (work, an event, a wait for another
// stream's event) is numbered by stream from 1: its seq; done(seq) says whether it ran. It runs
// either when the clock reaches its due time, which is its queueing plus the stream's lag and not
// before its predecessor's (lag mode), or when the test says so (manual mode: due never).
// Streams run interleaved in order of due time, then of queueing: the same program, the same run.
//
// Without hazard checks nobody looks at work, so lag mode keeps due times and queues nothing.
// Not thread-safe, the clock apart: owned by SimDriver, used under its mutex.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "driver/sim/sim_options.hpp"

namespace gpumemx {

class SimStreams {
 public:
  static constexpr std::int64_t kNever = INT64_MAX;

  struct Item {
    enum class Kind { kWork, kEvent, kWait };
    Kind kind = Kind::kWork;
    std::uint64_t seq = 0;
    std::int64_t due = 0;
    std::uint64_t serial = 0;
    std::vector<Access> accesses;
    GraphId graph{};            // work of a replayed graph
    StreamId awaited_stream{};  // kWait: this stream's item of this seq runs first
    std::uint64_t awaited_seq = 0;
  };
  struct Event {
    StreamId stream{};
    std::uint64_t seq = 0;
    std::int64_t due = 0;
    bool captured = false;  // SimDriver::lose_next_event()
  };
  // Runs one item whose time has come. It may not queue anything.
  using Runner = std::function<void(StreamId, const Item&)>;

  // `keeps_work`: whether work is queued in lag mode too.
  SimStreams(bool keeps_work, Runner runner);

  StreamRef create(int of_device);                       // see StreamRef::device
  void destroy(StreamRef stream, std::uint64_t serial);  // REQUIRES: is_alive(stream)
  // Id, native value and device must all be right: an id without its value is a stale copy.
  bool is_alive(StreamRef stream) const;
  std::uint64_t destroyed_by(StreamRef stream) const;  // serial, or 0
  StreamId alive_with(std::uint64_t native) const;     // or StreamId{}

  // The clock; readable from any thread. It never goes back.
  std::int64_t now() const { return now_.load(std::memory_order_relaxed); }
  // Moves the clock without running anything. True when something is due: call catch_up().
  bool move_clock(std::int64_t us);
  void catch_up();  // runs what is due

  void set_lag(std::int64_t us) { lag_ = us; }
  void set_lag(StreamRef stream, std::int64_t us) { at(stream.id).lag = us; }
  void set_manual(bool on);
  void set_manual(StreamRef stream, bool on);
  // A held stream is as one in manual mode, whatever was set.
  void hold(StreamId stream) { ++at(stream).holds; }
  void let_go(StreamId stream);
  bool is_held(StreamId stream) const { return at(stream).holds != 0; }

  // Queues an item and gives it its seq and due time. REQUIRES: is_alive(stream).
  // Nothing runs before the next catch_up().
  std::uint64_t next_seq(StreamId stream) const { return at(stream).next_seq; }
  std::uint64_t push(StreamRef stream, Item item);
  void complete(StreamId stream, std::uint64_t count);  // runs the next `count` items
  void complete_all();
  std::uint64_t queued(StreamId stream) const { return at(stream).queue.size(); }
  std::int64_t last_due() const;  // of all streams; never kNever
  bool done(StreamId stream, std::uint64_t seq) const { return seq <= at(stream).done_seq; }
  const Item* find(StreamId stream, std::uint64_t seq) const;  // null once it ran

  // REQUIRES: is_alive(stream)
  EventId record(StreamRef stream, std::uint64_t serial, bool captured);
  const Event* find(EventId event) const;  // null for one that is not live
  bool done(const Event& event) const;
  void run_up_to(const Event& event);
  void recycle(EventId event, std::uint64_t serial);  // REQUIRES: find(event)
  std::uint64_t recycled_by(EventId event) const;     // serial of the call that ended it, or 0
  std::uint64_t live_events() const { return live_events_; }

 private:
  struct Stream {
    std::uint64_t native = 0;
    int device = -1;
    std::uint64_t destroyed_by = 0;  // serial; 0 while alive
    std::optional<std::int64_t> lag;
    std::optional<bool> manual;
    int holds = 0;
    std::int64_t tail_due = 0;  // of the newest item
    std::uint64_t next_seq = 1;
    std::uint64_t done_seq = 0;
    std::deque<Item> queue;
  };
  struct EventSlot {
    std::uint32_t life = 0;  // odd while live; a stale id has another
    Event event;
    std::uint64_t recycled_by = 0;
  };

  Stream& at(StreamId id) { return streams_[static_cast<std::size_t>(id) - 1]; }
  const Stream& at(StreamId id) const { return streams_[static_cast<std::size_t>(id) - 1]; }
  bool is_manual(const Stream& stream) const {
    return stream.holds != 0 || stream.manual.value_or(is_manual_);
  }
  void reschedule(Stream& stream);  // gives due times to what manual mode left without
  void run_front(StreamId id);
  void run_through(StreamId id, std::uint64_t seq);

  const bool keeps_work_;
  const Runner runner_;
  std::atomic<std::int64_t> now_{0};
  std::atomic<std::int64_t> next_due_{kNever};  // not later than that of any queue's front
  std::int64_t lag_ = 0;
  bool is_manual_ = false;
  std::deque<Stream> streams_;          // by id - 1; a destroyed one stays, empty
  std::vector<StreamId> busy_;          // those whose queue is not empty
  std::vector<std::uint64_t> natives_;  // of destroyed streams, to be given to new ones
  std::vector<EventSlot> events_;
  std::vector<std::uint32_t> free_slots_;
  std::uint64_t live_events_ = 0;
};

}  // namespace gpumemx
