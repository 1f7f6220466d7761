// SPDX-License-Identifier: BSD-3-Clause
//
// The way of a hit and of a free, and the small public methods. Misses: miss.cpp; completion of
// streams: completion.cpp; handles and aliases: handles.cpp; private pools: pools.cpp; giving back:
// trim.cpp; looking at the books: introspect.cpp.
#include "core/allocator.hpp"

#include <algorithm>
#include <bit>

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

}  // namespace

DeviceAllocator::DeviceAllocator(DeviceDriver& driver, Options options)
    : driver_(driver),
      options_(std::move(options)),
      cap_(options_.cap.n),
      plain_mode_(options_.plain || !driver.traits().virtual_memory),
      books_(driver, plain_mode_ ? Bytes{} : address_space(driver)),
      addresses_(books_.arena.range()) {
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
void DeviceAllocator::note_peak(Bytes live) {
  peak_live_ = std::max(peak_live_, live);
  constexpr std::uint32_t kWhile = 1024;  // requests
  constexpr std::uint64_t kHardly = 16;   // by less than a 16th
  if (++requests_since_mark_ < kWhile) return;
  requests_since_mark_ = 0;
  has_settled_ = peak_live_ <= peak_at_mark_ + Bytes{peak_at_mark_.n / kHardly};
  peak_at_mark_ = peak_live_;
}

bool DeviceAllocator::wants_plain(const HeapSet& set) const { return set.plain || plain_mode_; }

Block* DeviceAllocator::take_hit(HeapSet& set, Bytes size, bool any_waste) {
  const auto try_heap = [&](HeapKind kind, std::int64_t most_waste) -> Block* {
    Heap* heap = set.heap_if_any(kind);
    if (heap == nullptr) return nullptr;
    const auto hit = find_hit(*heap, size, options_.hit_scan);
    if (!hit || (!any_waste && hit->waste > most_waste)) return nullptr;
    if (set.whole) return heap->take(hit->block, hit->block->begin, hit->block->size);
    return heap->take(hit->block, hit->at, size);
  };
  if (wants_plain(set)) {
    // A plain segment can't be taken apart, so there is nothing to save by refusing a part of it.
    constexpr std::int64_t kAnyWaste = INT64_MAX;
    if (Block* b = try_heap(heap_kind(size, true, options_), kAnyWaste)) return b;
    if (set.plain) return nullptr;
  }
  const HeapKind kind = heap_kind(size, false, options_);
  if (Block* b = try_heap(kind, static_cast<std::int64_t>(policy({}).hit_waste().n))) return b;
  if (kind != HeapKind::kSmall || any_waste) return nullptr;
  // A small block may use the left-overs of larger ones, where it makes nothing newly busy.
  return try_heap(HeapKind::kRest, -static_cast<std::int64_t>(size.n));
}

AllocResult DeviceAllocator::allocate(const AllocRequest& request) {
  if (shut_down_ || request.size > kMaxRequest) return fail(request, request.size, std::nullopt);
  const Bytes size = block_size(request.size);
  if (size > device_total_) return fail(request, size, std::nullopt);  // waiting would not help
  if (pending_count_.load(std::memory_order_relaxed) != 0 && work_mu_.try_lock()) {
    const RelaxedCapture relaxed(driver_);
    poll();
    work_mu_.unlock();
  }
  {
    MutexLock lock(mu_);
    if (Block* block = take_hit(heap_set(request.stream, request.pool), size, false)) {
      ++books_.stats.paths.hits;
      return hand_out(block, request);
    }
  }
  AllocResult result = allocate_slow(request, size);
  (void)hand_back_segments();
  return result;
}

AllocResult DeviceAllocator::hand_out(Block* block, const AllocRequest& request) {
  Stats& stats = books_.stats;
  const bool small = block->size <= kTorchSmall;
  block->use.requested = request.size;
  block->use.tag = request.tag;
  block->use.context = request.context;
  stats.allocation.add(small, 1);
  stats.allocated_bytes.add(small, block->size.n);
  stats.active.add(small, 1);
  stats.active_bytes.add(small, block->size.n);
  stats.requested_bytes.add(small, request.size.n);
  note_peak({static_cast<std::uint64_t>(stats.requested_bytes.all().current)});
  interval_peak_ =
      std::max(interval_peak_, {static_cast<std::uint64_t>(stats.allocated_bytes.all().current)});
  if (block->heap->set().is_private) ++stats.paths.private_blocks;
  if (captures_.load(std::memory_order_relaxed) > 0) ++stats.paths.capture_blocks;
  if (books_.history.on()) note(EventKind::kAlloc, *block);
  return {block->begin, block->size, nullptr};
}

void DeviceAllocator::note(EventKind kind, const Block& block) {
  const HeapSet& set = block.heap->set();
  books_.history.push({kind, block.begin, block.use.requested, set.timeline->stream().ref, set.pool,
                       block.use.tag, block.use.context});
}

// `freed`: when the caller freed it, on its own stream. That stream may be gone by now.
void DeviceAllocator::complete_free(Block* block, Stamp freed) {
  Stats& stats = books_.stats;
  const bool small = block->size <= kTorchSmall;
  stats.active.sub(small, 1);
  stats.active_bytes.sub(small, block->size.n);
  stats.requested_bytes.sub(small, block->use.requested.n);
  if (books_.history.on()) note(EventKind::kFreeCompleted, *block);
  block->heap->give(block, freed);
}

void DeviceAllocator::free(DeviceAddr address) {
  GPUMEMX_CHECK(free_if_live(address),
                "free() of an address that is not a live block (freed twice, freed with another "
                "allocator's function, or the books are damaged)");
}

// The books' part of a free. The events that it asks for are recorded without the lock.
bool DeviceAllocator::take_back(DeviceAddr address, ClosedEpoch& own,
                                std::vector<ClosedEpoch>& others) {
  mu_.assert_held();
  Block* block = books_.arena.find(address, books_.blocks);
  if (block == nullptr || block->state != BlockState::kLive) return false;
  Stats& stats = books_.stats;
  const bool small = block->size <= kTorchSmall;
  stats.allocation.sub(small, 1);
  stats.allocated_bytes.sub(small, block->size.n);
  if (books_.history.on()) note(EventKind::kFreeRequested, *block);

  if (captures_.load(std::memory_order_relaxed) > 0) keep_in_place(*block);
  const bool in_pool = block->heap->set().is_private;
  Timeline* line = block->heap->set().timeline;
  line->note_free(block->size);
  const Stamp freed{line, line->epoch()};
  const bool block_is_pending = !block->use.others.empty() && !planted(Fault::kPendingReused);
  if (block_is_pending) {
    PendingBlock pending{block, freed, {}};
    for (Timeline* other : block->use.others) {
      other->note_free(block->size);
      const std::uint64_t epoch = other->advance();
      pending.until.push_back({other, epoch});
      others.push_back({other, epoch, false});
    }
    block->state = BlockState::kPending;
    pending_.push_back(std::move(pending));
    pending_count_.store(pending_.size(), std::memory_order_relaxed);
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
  if (shut_down_) return true;
  ClosedEpoch own;
  std::vector<ClosedEpoch> others;
  {
    std::optional<MutexLock> lock;
    if (!planted(Fault::kLockNotTaken)) lock.emplace(mu_);
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
  Timeline& line = timeline(stream);
  if (&line == block->heap->set().timeline) return true;
  auto& others = block->use.others;
  if (std::find(others.begin(), others.end(), &line) == others.end()) others.push_back(&line);
  return true;
}

void DeviceAllocator::end_capture() {
  GPUMEMX_CHECK(captures_.fetch_sub(1) > 0, "end_capture() without begin_capture()");
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
  books_.stats.reset_peaks();
  for (auto& [pool, reserved] : books_.reserved_by_pool) reserved.reset_peaks();
}

void DeviceAllocator::reset_accumulated() {
  MutexLock lock(mu_);
  books_.stats.reset_accumulated();
  auto& reserved = books_.reserved_by_pool;
  for (auto pool = reserved.begin(); pool != reserved.end();) {
    const bool is_gone = !pools_.contains(pool->first);
    pool->second.reset_accumulated();
    pool = is_gone ? reserved.erase(pool) : std::next(pool);
  }
}

}  // namespace gpumemx
