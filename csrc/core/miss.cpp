// SPDX-License-Identifier: BSD-3-Clause
//
// What happens when no memory is ready for a request: find places, plan, and carry out a plan.
//
// Carrying out has three steps. The books are changed first, so that nobody else can use what the
// plan uses; then the driver is called without the books' lock; then the block is finished, or, when
// a call failed, everything that was got stays as free memory and the rest is put back.
#include <algorithm>
#include <utility>

#include "base/check.hpp"
#include "core/allocator.hpp"
#include "core/planted.hpp"

namespace gpumemx {

namespace {

// After this many requests in a row whose mapping failed (not for want of memory), virtual memory is
// taken to be broken on this machine and everything goes on in plain mode.
constexpr int kVmFailuresUntilPlain = 6;
// Failed plans for one request before it is served in plain mode.
constexpr int kPlanFailures = 3;
// How often a request is tried again because handles that were to go are gone.
constexpr int kReleases = 4;
// Where maintain() does not get to work, a handle keeps up to this many times Options::max_aliases.
constexpr std::uint32_t kCrowd = 2;

// Tells maintain() to keep out of the way.
class WantsWork {
 public:
  explicit WantsWork(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~WantsWork() { count_.fetch_sub(1); }
  WantsWork(const WantsWork&) = delete;
  WantsWork& operator=(const WantsWork&) = delete;

 private:
  std::atomic<int>& count_;
};

Error out_of_addresses(Bytes size) {
  return {Errc::kOutOfAddressSpace, size, "the device's address space is used up"};
}

}  // namespace

AllocResult DeviceAllocator::allocate_slow(const AllocRequest& request, Bytes size) {
  const RelaxedCapture relaxed(driver_);
  if (const auto source = source_of(request.pool)) {
    return allocate_from_source(*source, request, size);
  }
  Effort effort;
  std::optional<Error> error;
  bool is_again = false;
  do {
    close_full_epochs();
    std::optional<AllocResult> result;
    bool leaves_work = false;
    {
      const WantsWork wants(wanting_work_);
      const MutexLock work(work_mu_);
      poll_now_and_then(/*must=*/std::exchange(is_again, true));
      (void)refresh_capacity(/*only_if_tight=*/true);
      const MutexLock lock(mu_);
      unpark_all();
      dissolve_released_pools();
      HeapSet& set = heap_set(request.stream, request.pool);
      dissolve_settled_streams(set);
      Served served = serve(set, size, request.size);
      if (served.block == nullptr) served.block = take_from_overflow_pools(request, size);
      if (served.block != nullptr) result = hand_out(served.block, request);
      note_tight();
      error = std::move(served.error);
      leaves_work = !doomed_.empty() || !crowded_.empty();
    }
    if (leaves_work && maintenance_hook_) maintenance_hook_();
    if (result) return std::move(*result);
  } while (make_room(request, effort));
  return fail(request, size, error);
}

// A question costs 1.6 us, and misses come in bursts: while work is still under way, the next few do
// not ask at first. Whoever would grow, or give up, asks before that (poll_if_not_yet()).
void DeviceAllocator::poll_now_and_then(bool must) {
  constexpr int kMisses = 3;
  has_polled_ = must || !polled_in_vain_ || misses_unpolled_ >= kMisses;
  if (!has_polled_) {
    ++misses_unpolled_;
    return;
  }
  (void)poll(/*thorough=*/must);
  misses_unpolled_ = 0;
}

// True when that has found something.
bool DeviceAllocator::poll_if_not_yet() {
  if (has_polled_) return false;
  const MutexUnlock books_open(mu_);
  has_polled_ = true;
  misses_unpolled_ = 0;
  return poll();
}

// Near the device's capacity, what others on it have taken or given back decides what can be had. True
// when there is more than was known.
bool DeviceAllocator::refresh_capacity(bool only_if_tight) {
  Bytes reserved;
  {
    MutexLock lock(mu_);
    if (only_if_tight) {
      // A cap of our own below that is nobody else's business.
      Policy of_device = policy({});
      of_device.capacity = device_capacity_;
      if (!of_device.tight()) return false;
    }
    reserved = this->reserved();
  }
  const auto memory = driver_.memory();
  if (!memory.ok()) return false;
  MutexLock lock(mu_);
  const Bytes before = std::exchange(device_capacity_, reserved + memory.value().free);
  return device_capacity_ > before;
}

DeviceAllocator::Served DeviceAllocator::serve(HeapSet& set, Bytes size, Bytes requested) {
  if (Block* block =
          take_hit(set, size, HitWaste::kUsual)) {  // another thread may have made room meanwhile
    ++books_.stats.paths.hits;
    return {block, std::nullopt};
  }
  ++books_.stats.paths.misses;
  if (wants_plain(set)) {
    (void)poll_if_not_yet();
    return serve_plain(set, size);
  }

  if (books_.handles.mappings() > options_.max_mappings) drop_complete_aliases();
  Heap& heap = set.heap(heap_kind(size, false, options_), books_);
  MissPlanner planner(default_sets_, books_.handles);
  std::optional<Error> error;
  Bytes limit{~0ull};  // what the driver has just refused to go beyond
  int failures = 0;
  bool exceed_budget = false;
  for (;;) {
    const bool has_addresses = heap.open_end(size);
    if (!has_addresses && heap.regions().empty()) break;
    Policy now = policy(requested);
    now.capacity = std::min(now.capacity, limit);
    now.streak = heap.streak();
    now.idle = now.reserved - std::min(now.reserved, bytes_asked_for());
    bool carried_out = false;
    // In the end every place is tried: the fresh addresses of the open end always serve.
    const auto tries =
        exceed_budget ? CandidateSearch::kAllPlaces : static_cast<std::size_t>(options_.miss_tries);
    for (const Candidate& candidate : search_.find(heap, size, now, books_.handles, tries)) {
      const auto plan = planner.plan(heap, candidate, size, now, exceed_budget);
      if (!plan) continue;
      Served served = execute(*plan);
      if (served.block != nullptr) {
        if (candidate.run.n != ~0ull) ++books_.stats.paths.holes;
        vm_failures_ = 0;
        return served;
      }
      error = std::move(served.error);
      carried_out = true;
      break;  // the books were open to others meanwhile: look again
    }
    if (carried_out) {
      if (Block* block = take_hit(set, size, HitWaste::kUsual)) return {block, std::nullopt};
      if (error->code == Errc::kShuttingDown) return {nullptr, error};
      if (error->code == Errc::kOutOfMemory) {
        limit = reserved();
        device_capacity_ = std::min(device_capacity_, limit);
      } else {
        drop_complete_aliases();  // the driver may hold all the mappings that it can
      }
      if (++failures < kPlanFailures) continue;
      if (error->code == Errc::kOutOfMemory) return {nullptr, error};
      if (++vm_failures_ >= kVmFailuresUntilPlain) plain_mode_ = true;
      return serve_plain(set, size);
    }
    // Rather a wasteful place that is ready than memory beyond the budget.
    if (Block* block = take_hit(set, size, HitWaste::kAny)) return {block, std::nullopt};
    if (exceed_budget) {
      if (error || has_addresses) return {nullptr, error};
      break;
    }
    if (poll_if_not_yet()) continue;
    exceed_budget = true;
  }
  // No addresses are left, or there never were any; ordinary device allocations need none.
  Served served = serve_plain(set, size);
  if (served.block == nullptr && !served.error) served.error = out_of_addresses(size);
  return served;
}

DeviceAllocator::Served DeviceAllocator::execute(const MissPlan& plan) {
  Heap& heap = *plan.heap;
  PathCounts& paths = books_.stats.paths;
  const bool pinned = heap.set().is_private;
  std::vector<Unmap> unmaps;
  std::vector<Handle*> victims;
  std::vector<PieceWork> work;

  // 1. The books: from here on nobody else uses what the plan uses.
  for (Mapping* alias : plan.switches) {
    heap.make_home(alias);
    ++paths.alias_switches;
  }
  for (Mapping* stale : plan.stale) {
    drop_alias(stale, unmaps);
    ++paths.repointed;
  }
  Bytes planned = reserved();
  for (const Piece& piece : plan.pieces) {
    work.push_back({piece, {}, false, false});
    if (Handle* handle = piece.handle) {
      ++(handle->idle_list == &heap.set().idle          ? paths.harvested_own
         : handle->idle_list == &books_.handles.loose() ? paths.harvested_loose
                                                        : paths.harvested_other);
      if (handle->home != nullptr) Heap::leave_home(handle);
      handle->idle_list->remove(handle);
      const auto most = static_cast<std::uint32_t>(options_.max_aliases);
      if (options_.background && handle->alias_count >= most) crowded_.push_back(handle->id);
      while (handle->alias_count >= (options_.background ? kCrowd * most : most)) {
        Mapping* oldest = oldest_droppable(*handle);
        if (oldest == nullptr) break;
        drop_alias(oldest, unmaps);
        ++paths.aliases_dropped;
      }
    } else {
      planned += kPage * piece.pages;
    }
    if (Handle* victim = piece.victim) {
      ++paths.recut;
      if (victim->home != nullptr) Heap::leave_home(victim);
      victim->idle_list->remove(victim);
      if (can_release_later(*victim) && planned <= std::min(cap(), device_capacity_)) {
        victim->pinned = true;  // nobody takes it until maintain() releases it
        doomed_.push_back(victim);
      } else {
        victims.push_back(victim);
        planned -= victim->size();
        while (victim->aliases != nullptr) drop_alias(victim->aliases, unmaps);
      }
    }
  }
  Block* filling = heap.begin_fill(plan.fill_begin, plan.fill_end);

  // 2. The driver.
  std::optional<Error> error;
  std::size_t released = 0;
  {
    const MutexUnlock driver_only(mu_);
    error = unmap_all(unmaps);
    for (; !error && released < victims.size(); ++released) {
      const Status done = driver_.release(victims[released]->driver);
      if (!done.ok()) {
        error = done.error();
        break;
      }
    }
    if (!error) error = map_pieces(work);
  }

  // 3. The books again, with what there is now.
  for (std::size_t i = 0; i < victims.size(); ++i) {
    if (i < released) {
      books_.stats.reserved_bytes.sub(victims[i]->small, victims[i]->size().n);
      ++books_.stats.num_device_free;
      books_.handles.remove(victims[i]);
    } else {
      books_.handles.loose().push(victims[i]);
    }
  }
  Bytes created;
  bool used_again = !plan.switches.empty();
  for (const PieceWork& w : work) {
    Handle* handle = w.piece.handle;
    used_again = used_again || handle != nullptr || w.piece.victim != nullptr;
    if (w.created != HandleId{}) {
      handle = books_.handles.add(w.created, w.piece.pages);
      handle->small = is_small(heap.kind());
      books_.stats.reserved_bytes.add(handle->small, handle->size().n);
      ++books_.stats.num_device_alloc;
      ++paths.created;
      created += handle->size();
    }
    if (handle == nullptr) continue;  // not even created
    if (w.mapped) {
      handle->pinned = pinned;
      heap.install(filling, handle, w.piece.at);
    } else {
      books_.handles.loose().push(handle);
      // Kept as an alias, so that the address is not given to another handle before it is unmapped.
      if (w.stuck) unmaps.push_back({w.piece.at, handle, filling->region, {}});
    }
  }
  heap.note_miss(created, used_again);
  if (error) {
    ++paths.rollbacks;
    heap.cancel_fill(filling);
    restore(unmaps);  // not earlier: the filling does not count as their user
    return {nullptr, error};
  }
  return {heap.finish_fill(filling, plan.at, plan.size), std::nullopt};
}

// Creates and maps what the pieces need. On failure some are mapped and some are not.
std::optional<Error> DeviceAllocator::map_pieces(std::vector<PieceWork>& work) {
  for (PieceWork& w : work) {
    HandleId handle{};
    if (w.piece.handle != nullptr) {
      handle = w.piece.handle->driver;
    } else {
      const auto created = driver_.create(kPage * w.piece.pages);
      if (!created.ok()) return created.error();
      handle = w.created = created.value();
    }
    const AddrRange range{w.piece.at, kPage * w.piece.pages};
    const Status mapped = driver_.map(range, handle);
    if (!mapped.ok()) return mapped.error();
    const Status usable = driver_.set_access(range, peers_);
    if (!usable.ok()) {
      if (!planted(Fault::kRollbackForgets)) w.stuck = !driver_.unmap(range).ok();
      // "Out of memory" here means that the driver holds all the mappings it can.
      Error error = usable.error();
      if (error.code == Errc::kOutOfMemory) error.code = Errc::kDriverFailure;
      return error;
    }
    w.mapped = true;
  }
  return std::nullopt;
}

DeviceAllocator::Served DeviceAllocator::serve_plain(HeapSet& set, Bytes size) {
  Heap& heap = set.heap(heap_kind(size, true, options_), books_);
  Bytes segment = set.whole ? round_up(size, kPage) : plain_segment_size(size, heap.kind());
  std::optional<Error> error;
  // First the usual segment, then one as small as it can be, then that after giving back as much of the
  // cache as should do, and last after giving back all of it: what is known of the device's capacity
  // may be old.
  for (int step = 0; step < 4; ++step) {
    const Policy now = policy({});
    if (step == 1) segment = round_up(size, kPage);
    if (step >= 2) {
      const bool is_short = now.reserved + segment > now.capacity && now.capacity > segment;
      if (step == 2 && !is_short) continue;
      const Bytes freed = release_idle(step == 2 ? now.capacity - segment : Bytes{});
      if (freed.n == 0) continue;
      ++books_.stats.num_alloc_retries;
    }
    if (reserved() + segment > cap()) continue;
    std::optional<Result<DeviceAddr>> allocated;
    {
      const MutexUnlock driver_only(mu_);
      allocated = driver_.allocate(segment);
    }
    const Result<DeviceAddr>& address = *allocated;
    if (!address.ok()) {
      error = address.error();
      if (error->code == Errc::kShuttingDown) break;
      continue;
    }
    Handle* handle = books_.handles.add(HandleId{}, Policy::pages(segment));
    handle->small = is_small(heap.kind());
    books_.stats.reserved_bytes.add(handle->small, segment.n);
    ++books_.stats.num_device_alloc;
    ++books_.stats.paths.plain_segments;
    heap.add_segment({address.value(), segment}, handle);
    const Bytes block = set.whole ? segment : size;
    return {heap.take(heap.regions().back()->first, address.value(), block), std::nullopt};
  }
  // Others may have given something back while the driver was asked.
  if (Block* block = take_hit(set, size, HitWaste::kAny)) return {block, std::nullopt};
  return {nullptr, error};
}

// The request can't be served as things stand. Waits for work, frees, or asks others; true when it
// is worth another try.
bool DeviceAllocator::make_room(const AllocRequest& request, Effort& effort) {
  if (shut_down_) return false;
  if (hand_back_segments()) return true;
  {
    const MutexLock work(work_mu_);
    const MutexLock lock(mu_);
    // Left for maintain(), but wanted now. Not for ever: where mapping fails for other reasons, each
    // try leaves more.
    if (release_doomed() && effort.releases++ < kReleases) return true;
    if (is_rejected(request, block_size(request.size))) return false;
  }
  if (effort.attempt == 0) {
    effort.attempt = 1;
    const MutexLock work(work_mu_);
    if (refresh_capacity(/*only_if_tight=*/false)) return true;
  }
  if (wait_for_any()) return true;
  if (effort.attempt == 1) {
    effort.attempt = 2;
    const MutexLock work(work_mu_);
    const MutexLock lock(mu_);
    const bool kept = keep_no_longer();
    const bool pools = dissolve_released_pools();
    // Plain segments can't be harvested; they only help by going away.
    const bool plain = captures_.load() == 0 && release_idle_plain({}).n > 0;
    if (kept || pools || plain) {
      ++books_.stats.num_alloc_retries;
      return true;
    }
  }
  if (effort.asked) return false;
  effort.asked = true;
  std::vector<Observer*> observers;
  PressureInfo info{request.size, request.stream.ref, request.pool, /*attempt=*/1, {}, {}};
  if (const auto memory = driver_.memory(); memory.ok()) info.device_free = memory.value().free;
  {
    MutexLock lock(mu_);
    observers = observers_;
    info.cached = figures().idle;
    books_.stats.paths.callbacks += observers.size();
  }
  bool freed = false;
  for (Observer* observer : observers) freed = observer->on_pressure(info) || freed;
  if (!freed) return false;
  effort.attempt = 0;
  MutexLock lock(mu_);
  ++books_.stats.num_alloc_retries;
  return true;
}

namespace {

OomCause cause_of(const OomVerdict& v, bool capturing, bool shutting_down) {
  if (shutting_down) return OomCause::kShuttingDown;
  if (v.device_known ? v.block > v.device_total : v.requested > kMaxRequest) {
    return OomCause::kNonsenseSize;
  }
  const bool has_cap = !v.device_known || v.cap < v.device_total;
  const bool capped = has_cap && v.reserved + v.block > v.cap;
  if (capped && v.live + v.block > v.cap) return OomCause::kCapped;
  const Bytes reachable = v.idle + (capped ? Bytes{} : v.device_free);
  if (capturing && v.pending + v.idle_pending + reachable >= v.block) {
    return OomCause::kDuringCapture;
  }
  if (v.device_free >= v.block && !capped) return OomCause::kDriverRefused;
  if (reachable + v.pending + v.idle_pending >= v.block) return OomCause::kPendingOnStreams;
  if (reachable + v.idle_private >= v.block) return OomCause::kHeldByPools;
  if (reachable + v.held >= v.block) return OomCause::kFragmented;
  if (capped) return OomCause::kCapped;
  // A context and its libraries are "others" too, but nobody's fault.
  const bool many_others = v.others > Bytes{v.device_total.n / 20};
  const Bytes used = v.live + v.pending;
  if (many_others && used + v.block <= v.device_total) return OomCause::kOtherUsers;
  return OomCause::kFull;
}

}  // namespace

AllocResult DeviceAllocator::fail(const AllocRequest& request, Bytes size,
                                  const std::optional<Error>& error) {
  auto verdict = std::make_unique<OomVerdict>();
  verdict->requested = request.size;
  verdict->block = size;
  verdict->stream = request.stream.ref;
  verdict->pool = request.pool;
  if (shut_down_) {  // in a forked child no lock may be taken: who holds it may not be there
    verdict->cause = OomCause::kShuttingDown;
    return {{}, size, std::move(verdict)};
  }
  std::vector<Observer*> observers;
  const bool gone = error && error->code == Errc::kShuttingDown;
  std::optional<DeviceMemory> memory;
  if (!gone) {
    if (const auto m = driver_.memory(); m.ok()) memory = m.value();
  }
  {
    MutexLock lock(mu_);
    static_cast<MemoryFigures&>(*verdict) = figures();
    add_device(*verdict, memory);
    if (error) verdict->driver_said = error->where + ": " + to_string(error->code);
    verdict->cause = cause_of(*verdict, captures_.load() > 0, gone);
    verdict->rejected = is_rejected(request, size);
    ++(verdict->rejected ? books_.stats.num_oom_rejections : books_.stats.num_ooms);
    if (books_.history.on() && !verdict->rejected) {
      books_.history.push({EventKind::kOutOfMemory,
                           {verdict->device_free.n},
                           size,
                           request.stream.ref,
                           request.pool,
                           request.tag},
                          ContextRef(request.context));
    }
    observers = observers_;
  }
  for (Observer* observer : observers) observer->on_out_of_memory(*verdict);
  return {{}, size, std::move(verdict)};
}

}  // namespace gpumemx
