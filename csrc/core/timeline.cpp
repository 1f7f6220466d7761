// SPDX-License-Identifier: BSD-3-Clause
#include "core/timeline.hpp"

#include <algorithm>

#include "core/planted.hpp"

namespace gpumemx {

std::uint64_t Timeline::advance() {
  open_frees_ = 0;
  open_bytes_ = {};
  owes_event_ = false;
  if (planted(Fault::kEpochKeptOpen)) return epoch_;
  return epoch_++;
}

void Timeline::add_fence(std::uint64_t epoch, EventId event, std::uint64_t serial) {
  // Two threads may record at once and come here in either order; an event recorded for an epoch
  // covers all earlier ones whichever came first, so the list is kept by epoch.
  const auto at =
      std::upper_bound(fences_.begin(), fences_.end(), epoch,
                       [](std::uint64_t e, const Fence& fence) { return e < fence.epoch; });
  fences_.insert(at, Fence{epoch, event, serial, 0});
}

void Timeline::reopen(std::uint32_t frees, Bytes bytes) {
  open_frees_ += frees;
  open_bytes_ += bytes;
  owes_event_ = true;
}

Timeline::Fence* Timeline::find(EventId event) {
  for (Fence& fence : fences_) {
    if (fence.event == event) return &fence;
  }
  return nullptr;
}

Timeline::Fence* Timeline::oldest_open() {
  for (Fence& fence : fences_) {
    if (fence.epoch > done_) return &fence;
  }
  return nullptr;
}

Timeline::Fence* Timeline::next_to_ask() {
  Fence* oldest = oldest_open();
  if (oldest == nullptr) return nullptr;
  return oldest +
         std::min<std::ptrdiff_t>(&fences_.back() - oldest, static_cast<std::ptrdiff_t>(ahead_));
}

bool Timeline::lose(EventId event) {
  const Fence* fence = find(event);
  if (fence == nullptr || fence->waiters > 0) return false;
  fences_.erase(fences_.begin() + (fence - fences_.data()));
  reopen(1, {});
  return true;
}

std::optional<EventId> Timeline::pop_reached() {
  for (auto it = fences_.begin(); it != fences_.end() && it->epoch <= done_; ++it) {
    if (it->waiters > 0) continue;
    const EventId event = it->event;
    fences_.erase(it);
    return event;
  }
  return std::nullopt;
}

}  // namespace gpumemx
