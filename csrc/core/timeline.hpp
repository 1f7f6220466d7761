// SPDX-License-Identifier: BSD-3-Clause
//
// How far a stream has come, as far as the allocator needs to know.
//
// A stream's life is cut into epochs by the events that the allocator records on it. A use of memory
// is stamped with the epoch in which it ended (the free). An event recorded at the end of epoch e is
// reached only after all work queued in epochs <= e, so:
//
//   (1) done() <= e is false for every stamp whose work may still run: a stamp is complete exactly
//       when its epoch <= done().
//   (2) The epoch is advanced *before* its event is recorded, under the allocator's lock; frees that
//       come between the two carry the next epoch and wait for a later event. (Recording first would
//       let the event cover a free, and work queued before it, that it was recorded ahead of.)
//
// So one event covers any number of frees, and an event is recorded only when somebody will ask.
//
// Not thread-safe: guarded by the allocator's lock; the driver is called outside of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/units.hpp"

namespace gpumemx {

// A stream as the caller knows it. On streams that live as long as the process (torch's own) events
// are recorded lazily; any other may be destroyed at any time after a free, so there the event is
// recorded at the free.
struct StreamInfo {
  StreamRef ref;
  bool permanent = true;
  bool capturing = false;  // for sure: what is asked for belongs to a capture on this stream
};

class Timeline {
 public:
  explicit Timeline(StreamInfo stream) : stream_(stream), is_from_capture_(stream.capturing) {}

  const StreamInfo& stream() const { return stream_; }
  std::uint64_t epoch() const { return epoch_; }
  std::uint64_t done() const { return done_; }

  // A free of `size` bytes happened in the current epoch. Returns how much the epoch holds now.
  void note_free(Bytes size) {
    ++open_frees_;
    open_bytes_ += size;
  }
  // Memory of the current epoch's frees is in use again, so nobody waits for that free any more.
  void note_taken(Bytes size) { open_bytes_ -= std::min(open_bytes_, size); }
  // So many more frees, of memory that has been used again since.
  void note_reused(std::uint32_t frees) { open_frees_ += frees; }
  std::uint32_t open_frees() const { return open_frees_; }
  Bytes open_bytes() const { return open_bytes_; }

  // Ends the current epoch and returns its number, for which the caller now records an event.
  std::uint64_t advance();
  // The event that the caller recorded for `epoch`, with a serial number that orders all events of
  // the device. An epoch whose event could not be recorded is covered by the next one.
  void add_fence(std::uint64_t epoch, EventId event, std::uint64_t serial);
  // The event could not be recorded: its frees count as open again, so that a later event is.
  void reopen(std::uint32_t frees, Bytes bytes);
  bool owes_event() const { return owes_event_; }  // since then
  // Whether that was because the stream is capturing: when the capture ends, it still exists.
  bool is_captured() const { return is_captured_; }
  void set_captured(bool captured) { is_captured_ = captured; }
  // Seen for the first time in a capture that is under way: all that it did is part of a graph, which
  // runs on other streams, and it may be gone before the capture ends (torch captures the body of a
  // conditional node on such a stream). What is freed meanwhile gets no event.
  bool is_from_capture() const { return is_from_capture_; }
  void forget_capture() { is_from_capture_ = false; }
  void note_epoch_of_its_own(std::uint64_t epoch) { own_epochs_ = epoch; }
  // The last epoch whose work ran on this stream, as far as frees tell.
  std::uint64_t own_epochs() const { return own_epochs_; }
  // Nothing is under way: every free so far has its event, and all of those were reached.
  bool is_settled() const { return fences_.empty() && open_frees_ == 0 && done_ + 1 == epoch_; }
  // Whether the allocator looks at it when it asks all streams; it leaves those that have settled out.
  bool is_listed() const { return is_listed_; }
  void set_listed(bool listed) { is_listed_ = listed; }

  struct Fence {
    std::uint64_t epoch = 0;
    EventId event{};
    std::uint64_t serial = 0;
    int waiters = 0;  // threads in wait() on it; it must not be recycled meanwhile
  };
  bool has_fences() const { return !fences_.empty(); }
  std::size_t fences() const { return fences_.size(); }
  Fence& oldest() { return fences_.front(); }  // REQUIRES: has_fences()
  Fence* newest() { return fences_.empty() ? nullptr : &fences_.back(); }
  void drop_oldest() { fences_.erase(fences_.begin()); }
  Fence* find(EventId event);
  // The oldest event that is not known to be reached, or null. A reached one stays in front of it
  // while somebody waits for that.
  Fence* oldest_open();
  // The one to ask the driver about next, or null: when the last answers were yes, one further on, since
  // that also says that all before it are reached. What is heard goes to note_answer().
  Fence* next_to_ask();
  void note_answer(bool is_reached) {
    constexpr std::size_t kFarthest = 3;
    ahead_ = is_reached ? std::min(kFarthest, ahead_ * 2 + 1) : ahead_ / 2;
  }

  // The event of `epoch` was reached, and with it all before.
  void reached(std::uint64_t epoch) {
    if (epoch > done_) done_ = epoch;
  }
  // A capture has the event (DeviceDriver::query): it is removed, to be recycled, and its frees count as
  // open again. False while somebody waits on it.
  bool lose(EventId event);
  // An event of an epoch that is done and that nobody waits on: removed, to be recycled.
  std::optional<EventId> pop_reached();

 private:
  StreamInfo stream_;
  std::uint64_t epoch_ = 1;
  std::uint64_t done_ = 0;
  std::uint32_t open_frees_ = 0;
  Bytes open_bytes_;
  std::uint64_t own_epochs_ = 0;
  bool owes_event_ = false;
  bool is_from_capture_ = false;
  bool is_captured_ = false;
  bool is_listed_ = false;
  std::vector<Fence> fences_;  // by epoch
  std::size_t ahead_ = 0;      // how many open events next_to_ask() passes over
};

// The end of a use of memory: nothing, or an epoch of a stream.
struct Stamp {
  Timeline* timeline = nullptr;
  std::uint64_t epoch = 0;

  bool complete() const { return timeline == nullptr || epoch <= timeline->done(); }
};

}  // namespace gpumemx
