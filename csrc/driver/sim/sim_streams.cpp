// SPDX-License-Identifier: BSD-3-Clause
//
// The order in which a simulated device does its work.
#include "driver/sim/sim_streams.hpp"

#include <algorithm>
#include <utility>

namespace gpumemx {

namespace {

// The default stream is 0, as in CUDA; others look like pointers.
constexpr std::uint64_t kFirstNative = 0x5000'0000;
constexpr std::uint64_t kNativeStep = 0x100;

EventId event_id(std::size_t slot, std::uint32_t life) {
  return EventId{(std::uint64_t{life} << 32) | (slot + 1)};
}
std::size_t slot_of(EventId id) { return (static_cast<std::uint64_t>(id) & 0xffff'ffff) - 1; }
std::uint32_t life_of(EventId id) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(id) >> 32);
}

}  // namespace

SimStreams::SimStreams(bool keeps_work, Runner runner)
    : keeps_work_(keeps_work), runner_(std::move(runner)), streams_(1) {}

StreamRef SimStreams::create(int of_device) {
  Stream stream;
  stream.device = of_device;
  if (natives_.empty()) {
    stream.native = kFirstNative + kNativeStep * streams_.size();
  } else {
    stream.native = natives_.back();
    natives_.pop_back();
  }
  streams_.push_back(std::move(stream));
  return {StreamId{streams_.size()}, streams_.back().native, of_device};
}

void SimStreams::destroy(StreamRef stream, std::uint64_t serial) {
  at(stream.id).destroyed_by = serial;
  natives_.push_back(stream.native);
}

bool SimStreams::is_alive(StreamRef stream) const {
  const auto id = static_cast<std::uint64_t>(stream.id);
  if (id == 0 || id > streams_.size()) return false;
  const Stream& known = at(stream.id);
  return known.destroyed_by == 0 && known.native == stream.native && known.device == stream.device;
}

StreamId SimStreams::alive_with(std::uint64_t native) const {
  for (std::size_t i = streams_.size(); i-- > 0;) {
    const StreamRef stream{StreamId{i + 1}, native, streams_[i].device};
    if (is_alive(stream)) return stream.id;
  }
  return StreamId{};
}

std::uint64_t SimStreams::destroyed_by(StreamRef stream) const {
  const auto id = static_cast<std::uint64_t>(stream.id);
  return id == 0 || id > streams_.size() ? 0 : at(stream.id).destroyed_by;
}

bool SimStreams::move_clock(std::int64_t us) {
  std::int64_t now = now_.load(std::memory_order_relaxed);
  while (now < us && !now_.compare_exchange_weak(now, us, std::memory_order_relaxed)) {
  }
  return next_due_.load(std::memory_order_relaxed) <= us;
}

void SimStreams::catch_up() {
  const std::int64_t until = now();
  if (until < next_due_.load(std::memory_order_relaxed)) return;
  while (!busy_.empty()) {
    StreamId first{};
    std::pair<std::int64_t, std::uint64_t> best{kNever, 0};
    for (const StreamId id : busy_) {
      const Item& front = at(id).queue.front();
      if (const std::pair key{front.due, front.serial}; first == StreamId{} || key < best) {
        best = key;
        first = id;
      }
    }
    next_due_.store(best.first, std::memory_order_relaxed);
    if (best.first > until || best.first == kNever) return;
    run_front(first);
  }
  next_due_.store(kNever, std::memory_order_relaxed);
}

void SimStreams::run_front(StreamId id) {
  Stream& stream = at(id);
  const Item item = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (stream.queue.empty()) {
    std::erase(busy_, id);
    if (stream.tail_due == kNever) stream.tail_due = now();
  }
  if (item.kind == Item::Kind::kWait) run_through(item.awaited_stream, item.awaited_seq);
  stream.done_seq = item.seq;
  if (item.kind == Item::Kind::kWork) runner_(id, item);
}

// Waits name events that were recorded before them, so this recursion ends.
void SimStreams::run_through(StreamId id, std::uint64_t seq) {
  while (!at(id).queue.empty() && at(id).queue.front().seq <= seq) run_front(id);
}

void SimStreams::reschedule(Stream& stream) {
  if (is_manual(stream)) return;
  const std::int64_t due = now() + stream.lag.value_or(lag_);
  for (Item& item : stream.queue) item.due = std::min(item.due, due);
  if (stream.tail_due == kNever) stream.tail_due = due;
  next_due_.store(std::min(next_due_.load(std::memory_order_relaxed), due),
                  std::memory_order_relaxed);
}

void SimStreams::set_manual(bool on) {
  is_manual_ = on;
  for (const StreamId id : busy_) reschedule(at(id));
}

void SimStreams::set_manual(StreamRef stream, bool on) {
  at(stream.id).manual = on;
  if (!at(stream.id).queue.empty()) reschedule(at(stream.id));
}

void SimStreams::let_go(StreamId id) {
  Stream& stream = at(id);
  --stream.holds;
  if (!stream.queue.empty()) reschedule(stream);
}

std::uint64_t SimStreams::push(StreamRef ref, Item item) {
  Stream& stream = at(ref.id);
  item.seq = stream.next_seq++;
  if (is_manual(stream)) {
    item.due = kNever;
  } else {
    item.due = std::max(item.due, now() + stream.lag.value_or(lag_));
    item.due = std::max(item.due, stream.tail_due);
  }
  stream.tail_due = item.due;
  if (!keeps_work_ && item.due != kNever && stream.queue.empty()) return item.seq;

  next_due_.store(std::min(next_due_.load(std::memory_order_relaxed), item.due),
                  std::memory_order_relaxed);
  if (stream.queue.empty()) busy_.push_back(ref.id);
  stream.queue.push_back(std::move(item));
  return stream.queue.back().seq;
}

void SimStreams::complete(StreamId id, std::uint64_t count) {
  Stream& stream = at(id);
  if (stream.queue.empty()) {  // nothing is kept, or there is nothing: all of it is done
    stream.done_seq = stream.next_seq - 1;
    stream.tail_due = std::min(stream.tail_due, now());
  }
  while (count-- > 0 && !stream.queue.empty()) run_front(id);
}

void SimStreams::complete_all() {
  // By due time where there is one, so that this is the order in which waiting would run it.
  while (!busy_.empty()) {
    const auto first = std::min_element(busy_.begin(), busy_.end(), [this](StreamId a, StreamId b) {
      const Item& x = at(a).queue.front();
      const Item& y = at(b).queue.front();
      return std::pair(x.due, x.serial) < std::pair(y.due, y.serial);
    });
    run_front(*first);
  }
  for (Stream& stream : streams_) {
    stream.done_seq = stream.next_seq - 1;
    stream.tail_due = std::min(stream.tail_due, now());
  }
}

std::int64_t SimStreams::last_due() const {
  std::int64_t last = now();
  for (const Stream& stream : streams_) {
    if (stream.tail_due != kNever) last = std::max(last, stream.tail_due);
  }
  return last;
}

const SimStreams::Item* SimStreams::find(StreamId id, std::uint64_t seq) const {
  const auto& queue = at(id).queue;
  const auto it = std::lower_bound(queue.begin(), queue.end(), seq,
                                   [](const Item& item, std::uint64_t s) { return item.seq < s; });
  return it == queue.end() || it->seq != seq ? nullptr : &*it;
}

EventId SimStreams::record(StreamRef stream, std::uint64_t serial, bool captured) {
  Item item;
  item.kind = Item::Kind::kEvent;
  item.serial = serial;
  const std::uint64_t seq = push(stream, std::move(item));
  std::size_t slot = events_.size();
  if (free_slots_.empty()) {
    events_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
  }
  EventSlot& event = events_[slot];
  ++event.life;
  event.event = {stream.id, seq, at(stream.id).tail_due, captured};
  ++live_events_;
  return event_id(slot, event.life);
}

const SimStreams::Event* SimStreams::find(EventId id) const {
  const std::size_t slot = slot_of(id);
  if (slot >= events_.size()) return nullptr;
  const EventSlot& event = events_[slot];
  return event.life == life_of(id) && event.life % 2 == 1 ? &event.event : nullptr;
}

bool SimStreams::done(const Event& event) const {
  return event.due <= now() || done(event.stream, event.seq);
}

void SimStreams::run_up_to(const Event& event) { run_through(event.stream, event.seq); }

void SimStreams::recycle(EventId id, std::uint64_t serial) {
  EventSlot& event = events_[slot_of(id)];
  ++event.life;
  event.recycled_by = serial;
  free_slots_.push_back(static_cast<std::uint32_t>(slot_of(id)));
  --live_events_;
}

std::uint64_t SimStreams::recycled_by(EventId id) const {
  const std::size_t slot = slot_of(id);
  return slot < events_.size() ? events_[slot].recycled_by : 0;
}

}  // namespace gpumemx
