// SPDX-License-Identifier: BSD-3-Clause
//
// The short way of a request and of a free, and how what the fronts hold and count gets into the books.
//
// Figures. A front counts its stream's blocks itself, under its own lock; books_.stats has what was
// added in (folded) so far. The device's peak is exact as long as only one front counts at a time,
// Gate::counting: another one that wants to count first has that one's tally folded, under mu_. That is
// a few dozen nanoseconds a change, and what one thread does on several streams, or several threads do
// by turns, stays exact. A thread that comes to let_count() while another one is there, or is inside a
// request or a free of the long way, has proof that threads allocate at the same time: from there on
// several fronts count at once (Gate::several), nobody waits for anybody, and what was highest in each
// is added up. That ends after a while (kClosings), when the peaks are reset, and when something is
// counted that is no front's.
#include "core/front.hpp"

#include <algorithm>
#include <utility>

#include "core/allocator.hpp"
#include "core/planted.hpp"

namespace gpumemx {

namespace {

constexpr int kClosings =
    64;  // of all fronts, until it is tried again whether one counts at a time
constexpr std::size_t kTries = 4;  // places of Gate::fronts

// The first place of a stream. Ids can be handles, aligned addresses: their low bits are all the same.
std::size_t first_place(StreamId stream) {
  return static_cast<std::size_t>(static_cast<std::uint64_t>(stream) * 0x9E3779B97F4A7C15ull >> 48);
}

}  // namespace

DeviceAllocator::AllFronts::AllFronts(const DeviceAllocator& allocator)
    : locks_(allocator.fronted_) {
  auto& changed = const_cast<DeviceAllocator&>(allocator);
  changed.fold_locked();
  for (HeapSet* set : changed.fronted_) changed.unpark(*set);
}

// --- the short way

void DeviceAllocator::add_front(HeapSet& set) {
  const StreamId stream = set.timeline->stream().ref.id;
  // No more than may be free without an event behind it.
  set.front = std::make_unique<Front>(stream, options_.fence_frees - 1);
  fronted_.push_back(&set);
  for (std::size_t i = 0; i < kTries; ++i) {
    auto& place = gate_.fronts[(first_place(stream) + i) % gate_.fronts.size()];
    if (place.load(std::memory_order_relaxed) != nullptr) continue;
    place.store(set.front.get(), std::memory_order_release);
    return;
  }
  // More streams than places: this one's requests go the long way.
}

Front* DeviceAllocator::front_of(StreamId stream) const {
  for (std::size_t i = 0; i < kTries; ++i) {
    Front* front = gate_.fronts[(first_place(stream) + i) % gate_.fronts.size()].load(
        std::memory_order_acquire);
    if (front == nullptr || front->stream() == stream) return front;
  }
  return nullptr;
}

// A block that is parked in the front of the request's stream, handed out; null for the long way.
Block* DeviceAllocator::take_parked(const AllocRequest& request) {
  if (!is_parkable(request.size) || gate_.reasons.load(std::memory_order_relaxed) != 0 ||
      request.pool != kDefaultPool || request.context != nullptr) {
    return nullptr;
  }
  const Bytes size = block_size(request.size);
  Front* front = front_of(request.stream.ref.id);
  if (front == nullptr || !front->may_have(size)) return nullptr;
  if (!gate_.counts(*front)) let_count(*front);
  const MutexLock lock(front->mu);
  Block* block = gate_.lets(*front) ? front->take(size) : nullptr;
  if (block == nullptr) return nullptr;
  block->use.requested = request.size;
  block->use.tag = request.tag;
  front->tally.add(size, request.size);
  ++front->hits;
  return block;
}

// True when the free is done: the block waits in its stream's front for the next request of its size.
bool DeviceAllocator::park(DeviceAddr address) {
  if (gate_.reasons.load(std::memory_order_relaxed) != 0 || planted(Fault::kLockNotTaken)) {
    return false;
  }
  Block* block = arena_.find_unlocked(address, records_);
  if (block == nullptr) return false;
  Front* front = block->front.load(std::memory_order_acquire);
  if (front == nullptr) return false;
  if (!gate_.counts(*front)) let_count(*front);
  const MutexLock lock(front->mu);
  if (!gate_.lets(*front)) return false;
  // Whether it still is what it was. What belongs to a front stays as it is while its lock is held.
  const bool is_live = block->front.load(std::memory_order_relaxed) == front && !block->parked &&
                       block->begin == address;
  if (!is_live || !block->is_simple() || !front->park(block)) return false;
  front->tally.sub(block->size, block->use.requested);
  return true;
}

// The same with the books locked, for a history: the block's stack goes with its use. Blocks that come and
// go while events are recorded would else be joined with their neighbours and cut off again each time.
bool DeviceAllocator::park_with_events(Block& block) {
  Front* front = block.front.load(std::memory_order_relaxed);
  if (front == nullptr || planted(Fault::kLockNotTaken)) return false;
  count_on(front);
  const MutexLock lock(front->mu);
  if (block.parked || block.use.others != nullptr || block.shared || !front->park(&block)) {
    return false;
  }
  note(EventKind::kFreeRequested, block);
  note(EventKind::kFreeCompleted, block);
  front->tally.sub(block.size, block.use.requested);
  block.use.context = nullptr;
  return true;
}

// Whether that changed.
bool DeviceAllocator::note_reason(bool& counted, bool is_one) {
  if (counted == is_one) return false;
  counted = is_one;
  gate_.reasons.fetch_add(is_one ? 1 : -1);
  return true;
}

// Near the capacity every block's place is chosen with all free memory in view.
void DeviceAllocator::note_tight() { (void)note_reason(is_tight_, policy({}).tight()); }

// --- parked memory

// What is parked in the set's front becomes free memory of its heaps. It counts as freed now, which is
// later than it was: never too early for whoever waits for its last use. REQUIRES: the front is locked.
void DeviceAllocator::unpark(HeapSet& set) {
  Front& front = *set.front;
  front.mu.assert_held();
  Timeline* line = set.timeline;
  const Stamp freed{line, line->epoch()};
  line->note_reused(front.take_reused());
  front.take_all([&](Block* block) {
    line->note_free(block->size);
    block->heap->give(block, freed);
  });
}

void DeviceAllocator::unpark_all() { const AllFronts closed(*this); }

// --- figures

void DeviceAllocator::let_count(Front& front) {
  const bool others_do =
      letting_count_.fetch_add(1) > 0 || is_inside_.load(std::memory_order_relaxed);
  {
    MutexLock lock(mu_);
    if (others_do && !gate_.several.load()) {
      gate_.several.store(true);
      closings_left_ = kClosings;
    }
    count_on(&front);
  }
  letting_count_.fetch_sub(1);
}

void DeviceAllocator::change_counting(Front* front) {
  if (gate_.several.load(std::memory_order_relaxed)) {
    if (front != nullptr) return;
    const FrontLocks locks(fronted_);
    closings_left_ = 0;
    fold_locked();
    return;
  }
  Front* before = gate_.counting.load(std::memory_order_relaxed);
  if (before == front) return;
  if (before == nullptr) {
    gate_.counting.store(front, std::memory_order_relaxed);
    return;
  }
  const MutexLock lock(before->mu);
  fold(*before);
  gate_.counting.store(front, std::memory_order_relaxed);
}

void DeviceAllocator::note_hits(Front& front) {
  front.mu.assert_held();
  const std::uint64_t hits = std::exchange(front.hits, 0);
  books_.stats.paths.hits += hits;
  books_.stats.paths.front_hits += hits;
}

// REQUIRES: it is the only front that counts, and locked.
void DeviceAllocator::fold(Front& front) {
  front.mu.assert_held();
  note_hits(front);
  add_in(std::exchange(front.tally, {}));
}

// REQUIRES: all fronts are locked.
void DeviceAllocator::fold_locked() {
  Tally sum;
  for (HeapSet* set : fronted_) {
    Front& front = *set->front;
    front.mu.assert_held();
    sum += std::exchange(front.tally, {});
    note_hits(front);
  }
  add_in(sum);
  if (gate_.several.load(std::memory_order_relaxed) && --closings_left_ <= 0) {
    gate_.several.store(false);
    gate_.counting.store(nullptr);
  }
}

// What the fronts have counted, for a reader who changes nothing. Parked blocks are memory that is free
// and can't be given back, for as long as they are parked.
void DeviceAllocator::add_fronts_to(Stats& stats) const {
  const FrontLocks locks(fronted_);
  Tally sum;
  for (const HeapSet* set : fronted_) {
    const Front& front = *set->front;
    front.mu.assert_held();
    sum += front.tally;
    stats.paths.hits += front.hits;
    stats.paths.front_hits += front.hits;
    stats.inactive_split.count_besides(StatArray::kSmall, front.parked_blocks());
    stats.inactive_split_bytes.count_besides(StatArray::kSmall, front.parked_bytes().n);
  }
  sum.add_to(stats);
}

void DeviceAllocator::add_in(const Tally& tally) {
  Stats& stats = books_.stats;
  // The policy's own peak is not what may have been at different times.
  const std::int64_t requested =
      gate_.several.load(std::memory_order_relaxed) ? tally.requested_now() : tally.requested_top();
  const auto bytes = [](std::int64_t n) { return Bytes{static_cast<std::uint64_t>(n)}; };
  note_peak(bytes(stats.requested_bytes.all().current + requested), tally.requests());
  interval_peak_ =
      std::max(interval_peak_, bytes(stats.allocated_bytes.all().current + tally.bytes_top()));
  tally.add_to(stats);
}

}  // namespace gpumemx
