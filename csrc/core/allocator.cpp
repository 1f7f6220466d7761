// SPDX-License-Identifier: BSD-3-Clause
//
// The way of a hit and of a free, and the small public methods. Misses: miss.cpp; completion of
// streams: completion.cpp; handles and aliases: handles.cpp; private pools: pools.cpp; giving back:
// trim.cpp; looking at the books: introspect.cpp.
#include "core/allocator.hpp"

#include <algorithm>
#include <bit>
#include <thread>

#include "base/check.hpp"
#include "core/planted.hpp"

namespace gpumemx {

#ifdef GPUMEMX_PLANTED_FAULTS
Fault planted_fault = Fault::kNone;
#endif

namespace {

// Addresses to reserve: fresh ones are taken while old ones are still in use, by every stream and
// pool, so many times the device's memory; it costs nothing (docs/design.md, "Address space").
Bytes address_space(DeviceDriver& driver) {
  constexpr Bytes kLeast{1ull << 40}, kMost{64ull << 40};
  const auto memory = driver.memory();
  if (!memory.ok()) return kLeast;
  return std::clamp(Bytes{std::bit_ceil(memory.value().total.n)} * 64, kLeast, kMost);
}

// A request or a free of the long way is under way: for let_count().
class Inside {
 public:
  explicit Inside(std::atomic<bool>& flag) : flag_(flag) {
    flag_.store(true, std::memory_order_relaxed);
  }
  ~Inside() { flag_.store(false, std::memory_order_relaxed); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  std::atomic<bool>& flag_;
};

}  // namespace

DeviceAllocator::DeviceAllocator(DeviceDriver& driver, Options options)
    : driver_(driver),
      options_(std::move(options)),
      cap_(options_.cap.n),
      plain_mode_(options_.plain || !driver.traits().virtual_memory),
      books_(driver, plain_mode_ ? Bytes{} : address_space(driver)),
      addresses_(books_.arena.range()),
      arena_(books_.arena),
      records_(books_.blocks) {
  GPUMEMX_CHECK(!options_.validate(), "the options of the allocator are out of range");
  if (const auto memory = driver_.memory(); memory.ok()) {
    device_capacity_ = memory.value().free;
    device_total_ = memory.value().total;
  }
}

Timeline& DeviceAllocator::timeline(const StreamInfo& stream) {
  auto& line = timelines_[stream.ref.id];
  if (line == nullptr) {
    line = std::make_unique<Timeline>(stream);
  }
  list(*line);
  return *line;
}

void DeviceAllocator::list(Timeline& line) {
  if (line.is_listed()) return;
  line.set_listed(true);
  timeline_list_.push_back(&line);
}

HeapSet& DeviceAllocator::heap_set(const StreamInfo& stream, PoolId pool) {
  if (last_set_ != nullptr && last_set_->pool == pool &&
      last_set_->timeline->stream().ref.id == stream.ref.id) {
    if (!stream.permanent && !stream.capturing) last_set_->timeline->forget_capture();
    return *last_set_;
  }
  auto& set = sets_[{pool, stream.ref.id}];
  if (set == nullptr) {
    set = std::make_unique<HeapSet>();
    set->pool = pool;
    set->is_private = pool != kDefaultPool;
    set->timeline = &timeline(stream);
    if (set->is_private) {
      const auto found = pools_.find(pool);
      GPUMEMX_CHECK(found != pools_.end(), "a request names a private pool that does not exist");
      const PoolOptions& options = found->second.options;
      set->plain = options.plain || options.whole || options.source != nullptr;
      set->whole = options.whole;
      set->source = options.source;
    } else {
      default_sets_.push_back(set.get());
      if (!stream.permanent) ++temporary_sets_;
      if (set->timeline->stream().permanent) add_front(*set);
    }
  }
  if (!stream.permanent && !stream.capturing) set->timeline->forget_capture();
  last_set_ = set.get();
  return *set;
}

Policy DeviceAllocator::policy(Bytes more) const {
  const auto bytes = [](const Stat& s) { return Bytes{static_cast<std::uint64_t>(s.current)}; };
  return {options_, bytes(books_.stats.reserved_bytes.all()),
          std::max(peak_live_, bytes(books_.stats.requested_bytes.all()) + more),
          std::min(cap(), device_capacity_), has_settled_};
}

// A program that is still growing gets no cushion: large ones are small at first too, and what is laid
// out generously then wastes memory for good.
void DeviceAllocator::note_peak(Bytes live, std::int64_t requests) {
  peak_live_ = std::max(peak_live_, live);
  constexpr std::uint64_t kHardly = 16;  // by less than a 16th
  requests_since_mark_ += requests;
  if (requests_since_mark_ < kSettlingRequests) return;
  requests_since_mark_ = 0;
  has_settled_ = peak_live_ <= peak_at_mark_ + Bytes{peak_at_mark_.n / kHardly};
  peak_at_mark_ = peak_live_;
}

bool DeviceAllocator::wants_plain(const HeapSet& set) const { return set.plain || plain_mode_; }

Block* DeviceAllocator::take_hit(HeapSet& set, Bytes size, HitWaste waste) {
  constexpr std::int64_t kAnyWaste = INT64_MAX;
  const auto try_heap = [&](HeapKind kind, std::int64_t most_waste) -> Block* {
    Heap* heap = set.heap_if_any(kind);
    if (heap == nullptr) return nullptr;
    const auto hit = find_hit(*heap, size, options_.hit_scan);
    if (!hit || hit->waste > most_waste) return nullptr;
    // The first page stands for the rest: what it decides is only when the next event is due.
    const Stamp& last_use = hit->block->region->mapping_at(hit->at)->last_use;
    if (last_use.timeline == set.timeline && last_use.epoch == set.timeline->epoch()) {
      set.timeline->note_taken(size);
    }
    if (set.whole) return heap->take(hit->block, hit->block->begin, hit->block->size);
    return heap->take(hit->block, hit->at, size);
  };
  if (wants_plain(set)) {
    // A plain segment can't be taken apart, so there is nothing to save by refusing a part of it.
    if (Block* b = try_heap(heap_kind(size, true, options_), kAnyWaste)) return b;
    if (set.whole) return nullptr;  // what was mapped before is no allocation of its own
  }
  std::int64_t most_waste = waste == HitWaste::kAny ? kAnyWaste : 0;
  if (waste == HitWaste::kUsual) most_waste = static_cast<std::int64_t>(policy({}).hit_waste().n);
  const HeapKind kind = heap_kind(size, false, options_);
  if (Block* b = try_heap(kind, most_waste)) return b;
  if (kind != HeapKind::kSmall || waste == HitWaste::kAny) return nullptr;
  // A small block may use the left-overs of larger ones, where it makes nothing newly busy.
  return try_heap(HeapKind::kRest, -static_cast<std::int64_t>(size.n));
}

AllocResult DeviceAllocator::allocate(const AllocRequest& request) {
  if (const Block* block = take_parked(request)) return {block->begin, block->size, nullptr};
  if (shut_down_ || request.size > kMaxRequest) return fail(request, request.size, std::nullopt);
  const Bytes size = block_size(request.size);
  if (size > device_total_) return fail(request, size, std::nullopt);  // waiting would not help
  if (pending_count_.load(std::memory_order_relaxed) != 0 && work_mu_.try_lock()) {
    const RelaxedCapture relaxed(driver_);
    poll();
    work_mu_.unlock();
  }
  ClosedEpoch closed;
  Block* block = nullptr;
  {
    MutexLock lock(mu_);
    const Inside inside(is_inside_);
    HeapSet& set = heap_set(request.stream, request.pool);
    count_on(set.front.get());
    const FrontLock own(set.front.get());
    block = take_ready(set, size, closed);
    if (block != nullptr) {
      ++books_.stats.paths.hits;
      hand_out_locked(*block, request);
    }
  }
  if (closed.line != nullptr) record_fence(*closed.line, closed.epoch);
  if (block != nullptr) return {block->begin, block->size, nullptr};
  AllocResult result = allocate_slow(request, size);
  (void)hand_back_segments();
  return result;
}

// A hit in the heaps. REQUIRES: the set's front is locked.
Block* DeviceAllocator::take_ready(HeapSet& set, Bytes size, ClosedEpoch& closed) {
  Front* front = set.front.get();
  if (front == nullptr) return take_hit(set, size, HitWaste::kUsual);
  front->mu.assert_held();
  if (front->is_empty()) return take_hit(set, size, HitWaste::kUsual);
  // What is parked stays so where a small request does as well without it: else sizes that come by turns
  // would take their blocks from each other for ever.
  if (is_parkable(size)) {
    if (only_history_closes()) {
      if (Block* block = front->take(size)) {
        ++books_.stats.paths.front_hits;
        return block;
      }
    }
    if (Block* block = take_hit(set, size, HitWaste::kNone)) return block;
  }
  unpark(set);
  Timeline& line = *set.timeline;
  if (wants_fence(line)) closed = {&line, line.advance(), false};
  return take_hit(set, size, HitWaste::kUsual);
}

AllocResult DeviceAllocator::hand_out(Block* block, const AllocRequest& request) {
  Front* front = block->heap->set().front.get();
  count_on(front);
  const FrontLock own(front);
  hand_out_locked(*block, request);
  return {block->begin, block->size, nullptr};
}

// REQUIRES: the front of the block's set counts (count_on()), and is locked.
void DeviceAllocator::hand_out_locked(Block& block, const AllocRequest& request) {
  const HeapSet& set = block.heap->set();
  block.use.requested = request.size;
  block.use.tag = request.tag;
  if (request.context != nullptr) block.use.context = ContextRef(request.context);
  count_in(block, set.front.get());
  PathCounts& paths = books_.stats.paths;
  if (set.is_private) ++paths.private_blocks;
  if (captures_.load(std::memory_order_relaxed) > 0) ++paths.capture_blocks;
  if (books_.history.on()) note(EventKind::kAlloc, block);
}

// A block that was just handed out, into its front's reach and figures or, without one, into the books.
void DeviceAllocator::count_in(Block& block, Front* front) {
  if (front == nullptr) {
    Tally tally;
    tally.add(block.size, block.use.requested);
    add_in(tally);
    return;
  }
  front->mu.assert_held();
  front->tally.add(block.size, block.use.requested);
  if (is_parkable(block.size)) block.front.store(front, std::memory_order_release);
  if (gate_.several.load(std::memory_order_relaxed)) return;
  const std::int64_t live =
      books_.stats.requested_bytes.all().current + front->tally.requested_now();
  peak_live_ = std::max(peak_live_, {static_cast<std::uint64_t>(live)});
  if (front->tally.requests() >= kSettlingRequests) fold(*front);
}

void DeviceAllocator::note(EventKind kind, const Block& block) {
  const HeapSet& set = block.heap->set();
  books_.history.push(
      {kind, block.begin, block.use.requested, set.timeline->stream().ref, set.pool, block.use.tag},
      block.use.context);
}

// Its memory is ready. `freed`: when the caller freed it, on its own stream, which may be gone by now.
void DeviceAllocator::complete_free(Block* block, Stamp freed) {
  if (books_.history.on()) note(EventKind::kFreeCompleted, *block);
  block->heap->give(block, freed);
}

// The figures' part of that, where no front counts. REQUIRES: count_on(nullptr).
void DeviceAllocator::count_completed(const Block& block) {
  Stats& stats = books_.stats;
  const bool small = block.size <= kTorchSmall;
  stats.active.sub(small, 1);
  stats.active_bytes.sub(small, block.size.n);
  stats.requested_bytes.sub(small, block.use.requested.n);
}

void DeviceAllocator::free(DeviceAddr address) {
  GPUMEMX_CHECK(free_if_live(address),
                "free() of an address that is not a live block (freed twice, freed with another "
                "allocator's function, or the books are damaged)");
}

// Ends the caller's use of a block in the figures, and takes it out of its front's reach. False when the
// caller has freed it before.
bool DeviceAllocator::count_freed(Block& block, bool is_pending) {
  HeapSet& set = block.heap->set();
  Front* front = set.front.get();
  count_on(is_pending ? nullptr : front);
  const FrontLock own(front);
  if (block.parked) return false;
  block.front.store(nullptr, std::memory_order_relaxed);
  if (front != nullptr && !is_pending) {
    front->mu.assert_held();
    front->tally.sub(block.size, block.use.requested);
    set.timeline->note_reused(front->take_reused());
    // There was no room for it: what has been parked for longer makes room for the next.
    if (is_parkable(block.size) && front->is_full(block.size)) unpark(set);
    return true;
  }
  const bool small = block.size <= kTorchSmall;
  books_.stats.allocation.sub(small, 1);
  books_.stats.allocated_bytes.sub(small, block.size.n);
  if (!is_pending) count_completed(block);
  return true;
}

// For the gate: while blocks are pending, requests ask whether they still are.
void DeviceAllocator::note_pending() {
  const std::size_t before = pending_count_.exchange(pending_.size(), std::memory_order_relaxed);
  gate_.reasons.fetch_add((pending_.empty() ? 0 : 1) - (before == 0 ? 0 : 1));
}

// The books' part of a free. The events that it asks for are recorded without the lock.
bool DeviceAllocator::take_back(DeviceAddr address, ClosedEpoch& own,
                                std::vector<ClosedEpoch>& others) {
  mu_.assert_held();
  Block* block = books_.arena.find(address, books_.blocks);
  if (block == nullptr || block->state != BlockState::kLive) return false;
  if (only_history_closes() && park_with_events(*block)) return true;
  // Whether its neighbours are free is asked at the end, and they are seldom in a near cache.
  __builtin_prefetch(block->prev);
  __builtin_prefetch(block->next);
  const bool block_is_pending = block->use.others != nullptr && !planted(Fault::kPendingReused);
  if (!count_freed(*block, block_is_pending)) return false;
  if (books_.history.on()) note(EventKind::kFreeRequested, *block);

  if (captures_.load(std::memory_order_relaxed) > 0) keep_in_place(*block);
  HeapSet& set = block->heap->set();
  const bool in_pool = set.is_private;
  Timeline* line = set.timeline;
  line->note_free(block->size);
  const Stamp freed{line, line->epoch()};
  if (block_is_pending) {
    PendingBlock pending{block, freed, {}};
    for (Timeline* other : *block->use.others) {
      other->note_free(block->size);
      const std::uint64_t epoch = other->advance();
      pending.until.push_back({other, epoch});
      others.push_back({other, epoch, false});
    }
    block->state = BlockState::kPending;
    pending_.push_back(std::move(pending));
    note_pending();
  } else {
    complete_free(block, freed);
  }
  // A pending block waits for others: an event of its own stream would only be one more to wait for,
  // and can be recorded later if that stream still exists then.
  const bool can_wait = block_is_pending && line->stream().permanent;
  const bool only_in_pool = in_pool && line->open_frees() == 1;
  if (!can_wait && wants_fence(*line)) own = {line, line->advance(), only_in_pool};
  return true;
}

bool DeviceAllocator::free_if_live(DeviceAddr address) {
  if (park(address)) return true;
  if (shut_down_) return true;
  ClosedEpoch own;
  std::vector<ClosedEpoch> others;
  {
    std::optional<MutexLock> lock;
    if (!planted(Fault::kLockNotTaken)) lock.emplace(mu_);
    const Inside inside(is_inside_);
    if (!take_back(address, own, others)) return false;
  }
  // A frequent case costs no more than the branch: events are recorded for many frees at once.
  if (own.line != nullptr) record_fence(*own.line, own.epoch, own.in_pool);
  for (const ClosedEpoch& closed : others) record_fence(*closed.line, closed.epoch);
  return true;
}

bool DeviceAllocator::record_stream(DeviceAddr address, const StreamInfo& stream) {
  if (shut_down_) return true;
  MutexLock lock(mu_);
  Block* block = books_.arena.find(address, books_.blocks);
  if (block == nullptr || block->state != BlockState::kLive) return false;
  const FrontLock own(block->front.load(std::memory_order_relaxed));
  if (block->parked) return false;
  Timeline& line = timeline(stream);
  if (&line == block->heap->set().timeline) return true;
  auto& others = block->use.others;
  if (others == nullptr) others = std::make_unique<std::vector<Timeline*>>();
  if (std::find(others->begin(), others->end(), &line) == others->end()) others->push_back(&line);
  return true;
}

void DeviceAllocator::begin_capture() {
  // Whoever has found that there is no capture, and holds streams or frees plain memory therefore, is
  // through with it before one can begin.
  const MutexLock work(work_mu_);
  captures_.fetch_add(1);
  gate_.reasons.fetch_add(1);
  // An event that another thread records just now, on a stream that it has found in no capture, would get
  // into this one. CUDA does not synchronize graphs: at the same moment as this thread's own work that
  // crashes. Who records from here on finds the stream in a capture. Some microseconds.
  while (recording_.load() != 0) std::this_thread::yield();
}

void DeviceAllocator::end_capture() {
  GPUMEMX_CHECK(captures_.fetch_sub(1) > 0, "end_capture() without begin_capture()");
  gate_.reasons.fetch_sub(1);
  // What could not be recorded on capturing streams is recorded now, while they surely still exist.
  if (shut_down_) return;
  {
    MutexLock lock(mu_);
    for (Timeline* line : timeline_list_) line->forget_capture();
  }
  close_epochs(/*also_captured=*/true, /*beyond_limit=*/true);
}

void DeviceAllocator::add_observer(Observer* observer) {
  MutexLock lock(mu_);
  observers_.push_back(observer);
}

void DeviceAllocator::remove_observer(Observer* observer) {
  MutexLock lock(mu_);
  std::erase(observers_, observer);
}

Stats DeviceAllocator::stats() const {
  MutexLock lock(mu_);
  Stats now = books_.stats;
  add_fronts_to(now);
  if (returning_mark_ == 0) return now;
  const std::uint64_t mark = returning_mark_;
  books_.handles.for_each([&](const Handle* h) {
    if (!h->idle_before(mark)) return;
    now.returning_bytes += h->size();
    now.reserved_bytes.sub(h->small, h->size().n);
  });
  return now;
}

std::map<PoolId, StatArray> DeviceAllocator::reserved_by_pool() const {
  MutexLock lock(mu_);
  return books_.reserved_by_pool;
}

void DeviceAllocator::reset_peaks() {
  MutexLock lock(mu_);
  count_on(nullptr);
  books_.stats.reset_peaks();
  for (auto& [pool, reserved] : books_.reserved_by_pool) reserved.reset_peaks();
}

void DeviceAllocator::reset_accumulated() {
  MutexLock lock(mu_);
  count_on(nullptr);
  books_.stats.reset_accumulated();
  auto& reserved = books_.reserved_by_pool;
  for (auto pool = reserved.begin(); pool != reserved.end();) {
    const bool is_gone = !pools_.contains(pool->first);
    pool->second.reset_accumulated();
    pool = is_gone ? reserved.erase(pool) : std::next(pool);
  }
}

}  // namespace gpumemx
