// SPDX-License-Identifier: BSD-3-Clause
//
// Which work is complete: events are recorded and asked here. See timeline.hpp for why an epoch is
// advanced under the lock and its event recorded after it.
#include <algorithm>

#include "core/allocator.hpp"
#include "core/planted.hpp"

namespace gpumemx {

bool DeviceAllocator::wants_fence(const Timeline& line) const {
  if (!line.stream().permanent) return true;  // it may be destroyed right after this free
  if (line.fences() >= options_.max_fences) return false;
  // A large program frees so much that events at every 32 MiB would soon be max_fences, and what is
  // freed after that would have none (docs/design.md, "What the policy was tuned on").
  constexpr std::uint64_t kPeakShare = 16;
  const Bytes much = std::max(options_.fence_bytes, Bytes{peak_live_.n / kPeakShare});
  return line.open_frees() >= options_.fence_frees || line.open_bytes() >= much;
}

// REQUIRES: advance() returned `epoch`; frees since then do not count.
// `in_pool`: all that it would be for is of private pools. In a capture their work is a graph's, which release_pool()
// waits for, and a stream that was made in the capture may be gone when it ends: no event then.
void DeviceAllocator::record_fence(Timeline& line, std::uint64_t epoch, bool in_pool) {
  recording_.fetch_add(1);
  const auto event = driver_.record(line.stream().ref);
  recording_.fetch_sub(1);
  MutexLock lock(mu_);
  list(line);
  const bool captured = !event.ok() && event.error().code == Errc::kCaptureActive;
  if (captured && in_pool && line.is_from_capture() && !line.stream().permanent) return;
  line.set_captured(captured);
  line.note_epoch_of_its_own(epoch);
  if (event.ok()) {
    line.add_fence(epoch, event.value(), ++fence_serial_);
    ++books_.stats.paths.fences;
  } else {
    line.reopen(1, {});  // mostly a capture; a later event will cover it
  }
}

// Records an event on every stream that has frees without one. Called where somebody is about to
// want memory, so that it can be complete the next time. `also_captured`: a capture has just ended,
// so also on temporary streams that were capturing; elsewhere they may be gone. `beyond_limit`: also
// where Options::max_fences are in flight, for a caller that waits for all of them.
void DeviceAllocator::close_epochs(bool also_captured, bool beyond_limit) {
  close_epochs_if([&](const Timeline& line) {
    if (line.fences() >= options_.max_fences && !beyond_limit) return false;
    return line.stream().permanent || (also_captured && line.is_captured());
  });
}

// The same at a miss, which others may follow soon: not where little was freed since the last event,
// since each event costs a question as well.
void DeviceAllocator::close_full_epochs() {
  close_epochs_if([&](const Timeline& line) {
    mu_.assert_held();
    constexpr std::uint32_t kFrees = 16;
    constexpr std::uint64_t kPeakShare = 1024;
    if (line.fences() >= options_.max_fences || !line.stream().permanent) return false;
    if (line.owes_event()) return true;
    return line.open_frees() >= kFrees || line.open_bytes().n >= peak_live_.n / kPeakShare;
  });
}

template <class Which>
void DeviceAllocator::close_epochs_if(Which which) {
  std::vector<std::pair<Timeline*, std::uint64_t>> closed;
  {
    MutexLock lock(mu_);
    unpark_all();
    for (Timeline* line : timeline_list_) {
      if (line->open_frees() == 0 || !which(*line)) continue;
      closed.emplace_back(line, line->advance());
    }
  }
  for (const auto& [line, epoch] : closed) record_fence(*line, epoch);
}

// Asks an event of every stream, and the next where that one was reached. Returns whether anything came
// out of it. Events are removed only here, so none goes while another is asked or waited for
// (Fence::waiters). `thorough`: until the oldest event that was not reached is found; else the first no
// of a stream is its last answer, and what is known may be a few events old.
bool DeviceAllocator::poll(bool thorough) {
  struct Question {
    Timeline* line;
    Timeline::Fence fence;
    bool reached;
    bool lost;
  };
  std::vector<Question> questions;
  std::vector<EventId> used;
  bool any = false;
  if (planted(Fault::kCaptureNotRelaxed)) (void)driver_.exchange_capture_mode(CaptureMode::kGlobal);
  {
    MutexLock lock(mu_);
    for (Timeline* line : timeline_list_) {
      while (const auto event = line->pop_reached()) used.push_back(*event);
      if (const auto* open = line->next_to_ask()) questions.push_back({line, *open, false, false});
    }
  }
  polled_in_vain_ = !questions.empty();
  while (!questions.empty()) {
    for (Question& q : questions) {
      const auto reached = driver_.query(q.fence.event);
      q.reached = (reached.ok() && reached.value()) || planted(Fault::kEventSkipped);
      q.lost = !reached.ok() && reached.error().code == Errc::kCaptureActive;
    }
    MutexLock lock(mu_);
    std::vector<Question> next;
    for (const Question& q : questions) {
      const auto* oldest = q.line->oldest_open();
      const bool was_oldest = oldest == nullptr || oldest->event == q.fence.event;
      if (q.lost && q.line->lose(q.fence.event)) used.push_back(q.fence.event);
      q.line->note_answer(q.reached);
      if (q.reached) {
        any = true;
        q.line->reached(q.fence.epoch);
        while (const auto event = q.line->pop_reached()) used.push_back(*event);
      }
      if (!q.reached && (was_oldest || !thorough)) continue;
      if (const auto* open = q.line->next_to_ask()) next.push_back({q.line, *open, false, false});
    }
    if (next.empty() && any) retire_pending();
    questions = std::move(next);
  }
  for (const EventId event : used) driver_.recycle(event);
  if (any) polled_in_vain_ = false;
  return any;
}

void DeviceAllocator::retire_pending() {
  if (pending_.empty()) return;
  count_on(nullptr);
  std::size_t kept = 0;
  for (PendingBlock& pending : pending_) {
    const bool done = std::all_of(pending.until.begin(), pending.until.end(),
                                  [](const Stamp& s) { return s.complete(); });
    if (done) {
      ++books_.stats.paths.late_retired;
      count_completed(*pending.block);
      complete_free(pending.block, pending.freed);
    } else {
      if (&pending_[kept] != &pending) pending_[kept] = std::move(pending);
      ++kept;
    }
  }
  pending_.resize(kept);
  note_pending();
}

bool DeviceAllocator::wait_for(Timeline& line, EventId event, std::uint64_t epoch) {
  const bool reached = driver_.wait(event).ok();
  MutexLock lock(mu_);
  if (Timeline::Fence* fence = line.find(event)) --fence->waiters;
  if (reached) {
    line.reached(epoch);
    retire_pending();
  }
  return reached;
}

// Waits until any stream has come further: the one that was freed on first may be stuck until the
// program goes on, and the program waits for this request. No lock is held meanwhile: the work waited
// for may itself depend on another thread's request. False when there is nothing to wait for.
bool DeviceAllocator::wait_for_any() {
  if (captures_.load() > 0) return false;
  close_epochs();
  struct Open {
    Timeline* line;
    Timeline::Fence fence;
  };
  std::vector<Open> open;
  {
    MutexLock lock(mu_);
    for (Timeline* line : timeline_list_) {
      Timeline::Fence* fence = line->oldest_open();
      if (fence == nullptr) continue;
      ++fence->waiters;
      open.push_back({line, *fence});
    }
    if (open.empty()) return false;
    ++books_.stats.paths.waits;
  }
  std::sort(open.begin(), open.end(),
            [](const Open& a, const Open& b) { return a.fence.serial < b.fence.serial; });
  std::vector<EventId> events;
  events.reserve(open.size());
  for (const Open& o : open) events.push_back(o.fence.event);
  const auto reached = driver_.wait_any(events);
  MutexLock lock(mu_);
  for (const Open& o : open) {
    if (Timeline::Fence* fence = o.line->find(o.fence.event)) --fence->waiters;
  }
  if (!reached.ok()) return false;
  const Open& first = open[reached.value()];
  first.line->reached(first.fence.epoch);
  retire_pending();
  return true;
}

}  // namespace gpumemx
