// SPDX-License-Identifier: BSD-3-Clause
//
// The caching allocator of one device. It reserves memory from a DeviceDriver in handles, gives
// blocks of it to streams, and moves idle handles to where they are needed.
//
// Stream order is the contract: a block may be used by work queued on its stream after allocate()
// returned, and its memory goes to the next user on that stream at free(), whether or not the
// queued work is done. Uses on other streams are announced with record_stream() before the free.
//
// Threads: every method may be called from any thread at any time. Locks, always in this order:
//
//   work_mu_  one thread at a time changes what memory stands where: misses, trimming, polling.
//             Held across driver calls, but never while waiting for a stream or calling an observer.
//   mu_       the books. Never held across a driver call, so hits and frees go on while another
//             thread's miss is inside the driver.
//   Front::mu one a stream: all that a hit and a free of a small block mostly take. Several at once
//             only by who holds mu_.
//
// See docs/design.md, "Locks", "The hit path" and "What happens on a miss".
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.hpp"
#include "core/front.hpp"
#include "core/heap.hpp"
#include "core/memory_report.hpp"
#include "core/miss_plan.hpp"
#include "core/observer.hpp"
#include "core/oom.hpp"
#include "core/options.hpp"
#include "core/placement.hpp"
#include "core/sharing.hpp"
#include "driver/device_driver.hpp"

namespace gpumemx {

struct AllocRequest {
  Bytes size;  // 0 gives a block of 512 B
  StreamInfo stream;
  PoolId pool = kDefaultPool;
  std::uint64_t tag = 0;
  // Opaque; kept with the block and in the history. The caller holds it until the call returns.
  Context* context = nullptr;
  // What would grow beyond the cap fails at once: nobody is waited for or asked, nothing is freed.
  bool reject_above_cap = false;
};

struct [[nodiscard]] AllocResult {
  DeviceAddr address;
  Bytes size;                           // of the block
  std::unique_ptr<OomVerdict> failure;  // set exactly when there is no block

  bool ok() const { return failure == nullptr; }
};

struct PoolOptions {
  bool plain = false;  // ordinary device allocations: for legacy IPC and registration
  bool whole = false;  // each block is a plain allocation of its own, of whole pages
  std::shared_ptr<SegmentSource> source = nullptr;  // plain memory from here, not from the device
};

struct PoolInfo {
  int users = 0;
  Bytes reserved;  // memory that stands in the pool
  Bytes live;
};

// Which blocks of a private pool were live at a moment, and where. Goes stale with the pool's memory,
// which restore_pool() finds out.
struct PoolCheckpoint {
  struct LiveBlock {
    DeviceAddr address;
    Bytes size;
    Bytes requested;
    std::uint64_t tag = 0;
    ContextRef context{};
  };
  PoolId pool{};
  std::vector<LiveBlock> live;  // by address
};

// A block that was live before and is live after is in both lists.
struct RestoredPool {
  std::vector<DeviceAddr> freed;
  std::vector<DeviceAddr> allocated;
};

struct TrimRequest {
  std::optional<PoolId> pool;  // only this released private pool; default: everything that is idle
  Bytes target{};              // stop when reserved is at most this
  bool wait = true;            // wait for the work queued on the memory that goes
  bool predict = false;        // say first what will go. REQUIRES: no pool, no target
};

// released + what stays = what was reserved. The parts that stay, by reason:
struct TrimReport {
  Bytes predicted;  // as TrimRequest::predict asked, before anything was done
  Bytes released;
  Bytes live;     // in use, or pending on recorded streams
  Bytes held;     // free, but on handles that something in use shares
  Bytes pending;  // idle, last use not complete (with wait: a capture was under way)
  Bytes pools;    // idle in private pools that are in use
  Bytes wanted;   // idle, kept because the target was reached
};

struct BlockInfo {
  DeviceAddr address;
  Bytes size;
  Bytes requested;
  BlockState state{};
  StreamRef stream;
  PoolId pool{};
  HeapKind heap{};
  DeviceAddr segment;  // plain memory: where its device allocation begins
  std::uint64_t tag = 0;
  ContextRef context;
};

// What stands behind a live block: for whoever registers its memory with a network card or a library.
// It stays as it is while the block lives, except when the block is first shared between processes.
struct BlockMemory {
  AddrRange block;
  std::vector<AddrRange> handles;  // whole ones, side by side; plain: its device allocation
  bool plain = false;
  bool exportable = false;  // as file descriptors, one a handle
};

// A contiguous run of memory of one heap: what the map and unmap events of the history add up to, or
// one plain device allocation. Its blocks, which tile it, are blocks[first .. first + count) of the
// layout.
struct SegmentInfo {
  AddrRange range;
  StreamRef stream;
  PoolId pool{};
  HeapKind heap{};
  std::uint64_t serial = 0;  // of its addresses: later ones were taken later
  ContextRef context;        // of what brought the memory at its begin
  std::size_t first = 0;
  std::size_t count = 0;
};

// Everything at one moment. Blocks that a miss is filling right now are shown as free memory, as far
// as there is memory.
struct MemoryLayout {
  std::vector<SegmentInfo> segments;  // by address
  std::vector<BlockInfo> blocks;
  Bytes active;
  std::uint64_t events = 0;  // how many the history had seen: history(events) led to this layout
};

class DeviceAllocator {
 public:
  // Keeps a reference to `driver`, which must outlive the allocator. Takes addresses, no memory.
  // REQUIRES: options.validate() finds nothing.
  DeviceAllocator(DeviceDriver& driver, Options options);
  // Gives everything back, whatever is still live, unless shut_down() was called.
  ~DeviceAllocator();
  DeviceAllocator(const DeviceAllocator&) = delete;
  DeviceAllocator& operator=(const DeviceAllocator&) = delete;

  // May call the driver; waits for streams only when nothing else is left.
  AllocResult allocate(const AllocRequest& request) GPUMEMX_EXCLUDES(work_mu_, mu_);

  // REQUIRES: `address` came from allocate() and is live; anything else aborts, in every build.
  void free(DeviceAddr address) GPUMEMX_EXCLUDES(work_mu_, mu_);
  // The same for callers that can tell the user: false, and nothing happens, for anything else.
  // (No static analysis: a planted fault leaves the lock out. take_back() checks it.)
  [[nodiscard]] bool free_if_live(DeviceAddr address) GPUMEMX_NO_TSA;
  // The block is also used by work queued on `stream` so far and until the free. False, and nothing
  // happens, when `address` is not a live block.
  bool record_stream(DeviceAddr address, const StreamInfo& stream) GPUMEMX_EXCLUDES(mu_);

  // A private pool: its memory stays where it is while the pool has users, also when no block is
  // live (graphs are replayed on it), and comes from new or completely idle memory.
  PoolId create_pool(PoolOptions options) GPUMEMX_EXCLUDES(mu_);
  void retain_pool(PoolId pool) GPUMEMX_EXCLUDES(mu_);
  // The last release lets the memory go to others, when all work queued until now is done.
  void release_pool(PoolId pool) GPUMEMX_EXCLUDES(work_mu_, mu_);

  // How it is now; nothing when it never was or is gone with all its memory. O(its blocks).
  std::optional<PoolInfo> pool_info(PoolId pool) const GPUMEMX_EXCLUDES(mu_);
  // From now on new memory of the pool is plain (PoolOptions::plain). What it has stays as it is.
  void set_plain(PoolId pool) GPUMEMX_EXCLUDES(work_mu_, mu_);
  // From now on each block of the pool is a plain allocation of its own (PoolOptions::whole).
  void set_whole(PoolId pool) GPUMEMX_EXCLUDES(mu_);
  // What is ready in the pool serves requests of the same stream that nothing else serves, before
  // anything is waited for or given back.
  void set_use_on_oom(PoolId pool, bool use) GPUMEMX_EXCLUDES(mu_);

  // For trees of graphs: which blocks are live now, and making exactly those live again. Waits for
  // streams that are recorded on what is in the way. Fails, with no effect, when memory of the
  // checkpoint is not in the pool any more (kInvalidArgument); and when such a stream can't be waited
  // for, in a capture (kCaptureActive): then what was live is free. REQUIRES: the pool has users, and
  // nobody else uses it meanwhile.
  PoolCheckpoint checkpoint_pool(PoolId pool) const GPUMEMX_EXCLUDES(mu_);
  Result<RestoredPool> restore_pool(const PoolCheckpoint& checkpoint)
      GPUMEMX_EXCLUDES(work_mu_, mu_);

  // Graphs that use a private pool will be replayed on `stream`, which the allocator may not have seen:
  // release_pool() then waits for its work too. REQUIRES: the stream is permanent, or its replays are
  // complete before the pool is released.
  void note_stream(const StreamInfo& stream) GPUMEMX_EXCLUDES(mu_);

  // Between the two, no request waits, no plain memory is freed, no memory is moved. May nest.
  // begin_capture() comes before the driver's begin of the capture, and blocks while another thread is
  // in a miss, moves memory or records an event; end_capture() after its end and before its stream is
  // destroyed.
  void begin_capture() GPUMEMX_EXCLUDES(work_mu_, mu_);
  void end_capture() GPUMEMX_EXCLUDES(work_mu_, mu_);

  // --- other processes and other devices (sharing.cpp)

  // What another process needs to reach the block in use that `address` lies in. Handles of several
  // sizes under it are first replaced by some of one size, the content kept, the addresses the same.
  // That waits for the device and holds the permanent streams that are known until it is done: work that
  // is queued on them meanwhile, by whomever, runs after it. Work on other streams may not touch the
  // block meanwhile, nor (rarely, where the block shares a handle of the wrong size with others) its
  // neighbours; and copies and fills by the driver are refused for such addresses for some ten us a
  // handle, wherever they are queued. Only where other shared blocks stand in the way do several sizes
  // remain. What is shared stays where it is until the block is freed; the caller frees it when all
  // consumers are done.
  // Fails: kInvalidArgument for another address; kUnsupported where memory can't be exported;
  // kCaptureActive; kOutOfMemory.
  Result<SharedRange> share(DeviceAddr address) GPUMEMX_EXCLUDES(work_mu_, mu_);

  // Maps another process's handles side by side. Not counted as reserved.
  // Fails: with the driver's error; then nothing is mapped.
  Result<DeviceAddr> import_memory(const std::vector<ForeignHandle>& handles)
      GPUMEMX_EXCLUDES(work_mu_, mu_);
  // Waits for the device, but during a capture: then it is closed by a later import.
  // REQUIRES: import_memory() returned `address`, closed once.
  void close_import(DeviceAddr address) GPUMEMX_EXCLUDES(work_mu_, mu_);

  // Another device may use all memory of this one, what is mapped now and later, and imported memory.
  // Fails: with the driver's error; then it may use some.
  Status add_peer(int device) GPUMEMX_EXCLUDES(work_mu_, mu_);

  // A block at this address, which must be free in the heaps of the request's stream and pool; memory is
  // brought there if need be. Nothing where that can't be.
  std::optional<AllocResult> allocate_at(const AllocRequest& request, DeviceAddr address)
      GPUMEMX_EXCLUDES(work_mu_, mu_);

  TrimReport trim(const TrimRequest& request) GPUMEMX_EXCLUDES(work_mu_, mu_);

  // Marks what is idle now as on its way back to the device, without a driver call: maintain() may
  // release it, and whatever a request takes first is not marked any more. For programs that give back
  // again and again what they need again at once. Returns the bytes that are marked; nothing, and marks
  // nothing, when this must not wait: a released pool has memory left, or a history wants the frees.
  std::optional<Bytes> give_back_later() GPUMEMX_EXCLUDES(mu_);
  Bytes returning() const GPUMEMX_EXCLUDES(mu_);

  // Work that may be done away from the allocating threads, one driver call's worth of it: unmapping
  // surplus aliases, releasing what a re-cut replaced and, when asked to, what give_back_later()
  // marked. False when nothing was to be done, or an allocating thread wants the driver: those go
  // first.
  bool maintain(bool release_returning = false) GPUMEMX_EXCLUDES(work_mu_, mu_);

  // Reserved bytes that this process may hold; ~0 for no cap. Memory above a new cap stays.
  void set_cap(Bytes cap) { cap_.store(cap.n); }
  Bytes cap() const { return {cap_.load()}; }

  // Takes what is parked back into the heaps. Peaks: stats.hpp says when they are exact.
  Stats stats() const GPUMEMX_EXCLUDES(mu_);
  // What stands in each private pool. Of one that is gone: 0 now, the rest until reset_accumulated().
  std::map<PoolId, StatArray> reserved_by_pool() const GPUMEMX_EXCLUDES(mu_);
  void reset_peaks() GPUMEMX_EXCLUDES(mu_);
  void reset_accumulated() GPUMEMX_EXCLUDES(mu_);

  // Records the history with room for `capacity` events, or turns it off with 0. It starts empty,
  // unless it is on already and told to keep what it has.
  void record_history(std::size_t capacity, History::Clock clock = nullptr,
                      const HistoryRules& rules = {}, bool keep = false) GPUMEMX_EXCLUDES(mu_);
  // The events that are kept, of the first `until` that were ever recorded. Copied in slices, so that
  // nobody waits for long: what is overwritten meanwhile is left out, from the oldest on.
  std::vector<HistoryEvent> history(std::uint64_t until = ~0ull) const GPUMEMX_EXCLUDES(mu_);
  // `listener` is told of every event from now on, whether or not the history is recorded; null for
  // nobody. The caller keeps ownership.
  void listen(HistoryListener* listener, History::Clock clock = nullptr) GPUMEMX_EXCLUDES(mu_);
  // Puts a kAnnotate event about the live block at `address` into the history; what is said is in the
  // thread's Cause. False when there is no such block.
  bool annotate(DeviceAddr address) GPUMEMX_EXCLUDES(mu_);

  // Where the bytes are now; asks the device. REQUIRES: not in a capture of this thread.
  MemoryFigures memory_figures() GPUMEMX_EXCLUDES(mu_);
  // The same by cause, and what trim() would give back. Asks the streams how far they are, and waits for
  // none; may wait for another thread's request that is inside the driver. O(everything).
  // REQUIRES: not in a capture of this thread.
  MemoryReport memory_report() GPUMEMX_EXCLUDES(work_mu_, mu_);
  // All addresses at which memory of this allocator, or imported by it, may stand.
  std::vector<AddrRange> address_ranges() const GPUMEMX_EXCLUDES(work_mu_, mu_);
  // The highest allocated_bytes since the last call, and starts anew from the current ones. For
  // scopes, which must not disturb the peaks of stats(); has one caller (monitor/scope.hpp).
  Bytes take_interval_peak() GPUMEMX_EXCLUDES(mu_);
  // Whether `address` is in addresses of this allocator. No lock, unless it is plain memory.
  bool owns(DeviceAddr address) const GPUMEMX_EXCLUDES(mu_);

  // The contiguous run of memory of one heap that `address` lies in, or nothing where none stands.
  std::optional<AddrRange> segment_of(DeviceAddr address) const GPUMEMX_EXCLUDES(mu_);
  // What the live block that `address` lies in stands on, or nothing where there is none.
  std::optional<BlockMemory> memory_behind(DeviceAddr address) const GPUMEMX_EXCLUDES(mu_);
  // About the largest block that can be had without more memory from the device. Waits for nothing.
  Bytes largest_cached() const GPUMEMX_EXCLUDES(mu_);

  // Every block that is in use or ready, by address.
  std::vector<BlockInfo> blocks() const GPUMEMX_EXCLUDES(mu_);
  // The segments and their blocks, of one pool or of all.
  MemoryLayout layout(std::optional<PoolId> pool = std::nullopt) const GPUMEMX_EXCLUDES(mu_);
  // Puts a kSnapshot event into the history: somebody has looked and found this much active. Apart
  // from layout(), so that in a full history it takes the place of no event that is still to be read.
  void note_snapshot(Bytes active, PoolId pool = kDefaultPool) GPUMEMX_EXCLUDES(mu_);
  // The live block that begins at `address`, or nothing.
  std::optional<BlockInfo> find_block(DeviceAddr address) const GPUMEMX_EXCLUDES(mu_);

  // Asked in the order of registration; the caller keeps ownership, and removes it before it dies.
  void add_observer(Observer* observer) GPUMEMX_EXCLUDES(mu_);
  void remove_observer(Observer* observer) GPUMEMX_EXCLUDES(mu_);

  // The process is exiting: from now on no driver call is made, and frees are ignored.
  void shut_down() {
    shut_down_.store(true);
    gate_.reasons.fetch_add(1);
  }

  const Options& options() const { return options_; }

  // Called, with no lock held, when a request has left something for maintain(). REQUIRES: set before
  // the first request.
  void set_maintenance_hook(std::function<void()> hook) { maintenance_hook_ = std::move(hook); }

  // True when requests are served with ordinary device allocations, by choice or because virtual
  // memory is missing or has failed.
  bool plain_mode() const { return plain_mode_.load(); }

  // The first broken invariant of the books in words, or nothing. O(everything).
  std::optional<std::string> validate() const GPUMEMX_EXCLUDES(mu_);

 private:
  static constexpr std::size_t kTemporarySets = 16;
  static constexpr std::int64_t kSettlingRequests = 1024;  // note_peak()

  struct SetKey {
    PoolId pool;
    StreamId stream;
    friend bool operator==(SetKey, SetKey) = default;
  };
  struct SetKeyHash {
    std::size_t operator()(SetKey k) const {
      return static_cast<std::size_t>(k.pool) * 0x9E3779B97F4A7C15ull ^
             static_cast<std::size_t>(k.stream);
    }
  };
  // Whether a request or a free may go the short way, through a front alone. All of it is read by every
  // one of them and written by hardly any.
  struct alignas(kCacheLine) Gate {
    // For everybody to go the long way: a history, captures, pending blocks, memory that is short, the
    // end. One each.
    std::atomic<int> reasons{0};
    // The one front that counts, or several; see front.cpp, "Figures".
    std::atomic<Front*> counting{nullptr};
    std::atomic<bool> several{false};
    // By the low bits of the stream's number; where that is taken, one of the next places.
    std::array<std::atomic<Front*>, 256> fronts{};

    bool lets(const Front& front) const {
      return reasons.load(std::memory_order_relaxed) == 0 && counts(front);
    }
    bool counts(const Front& front) const {
      return counting.load(std::memory_order_relaxed) == &front ||
             several.load(std::memory_order_relaxed);
    }
  };
  class FrontLocks {  // all of them, for a scope. REQUIRES: mu_ is held
   public:
    explicit FrontLocks(const std::vector<HeapSet*>& fronted) GPUMEMX_NO_TSA : fronted_(fronted) {
      for (const HeapSet* set : fronted_) set->front->mu.lock();
    }
    ~FrontLocks() GPUMEMX_NO_TSA {
      for (const HeapSet* set : fronted_) set->front->mu.unlock();
    }
    FrontLocks(const FrontLocks&) = delete;
    FrontLocks& operator=(const FrontLocks&) = delete;

   private:
    const std::vector<HeapSet*>& fronted_;
  };
  // All fronts, locked for a scope: what they have counted is in the books, and what was parked in them
  // is free memory. The allocator may be const: no figure changes. Where the next blocks are placed may,
  // so statistics, which programs read all the time, do without (add_fronts_to()).
  class AllFronts {
   public:
    explicit AllFronts(const DeviceAllocator& allocator) GPUMEMX_NO_TSA;  // REQUIRES: mu_ is held

   private:
    const FrontLocks locks_;
  };
  struct PrivatePool {
    PoolOptions options;
    int users = 1;
    bool use_on_oom = false;
    std::vector<Stamp> until;   // after the last release: when its memory may move on
    std::vector<Stamp> before;  // the last epoch of each stream that `until` covers
  };
  enum class HitWaste { kNone, kUsual, kAny };  // of idle memory, that a hit may make busy
  struct ClosedEpoch {                          // for which an event is to be recorded
    Timeline* line = nullptr;
    std::uint64_t epoch = 0;
    bool in_pool = false;  // all that was freed since the last event is of private pools
  };
  struct PendingBlock {
    Block* block;
    Stamp freed;               // on its own stream
    std::vector<Stamp> until;  // on the others
  };
  struct Unmap {  // a mapping that is out of the books, and what it takes to put it back
    DeviceAddr begin;
    Handle* handle;
    Region* region;
    Stamp last_use;
  };
  struct PieceWork {
    Piece piece;
    HandleId created{};
    bool mapped = false;
    bool stuck = false;  // mapped, but neither usable nor to be unmapped
  };
  struct Returned {  // a segment on its way back to the third party that made it
    std::shared_ptr<SegmentSource> source;
    DeviceAddr address;
  };
  struct SharePlan {                     // for a block that is to be shared
    std::vector<Mapping*> mappings;      // of ShareSite::parts; null for a page that is void
    std::optional<UniformPlan> uniform;  // none: the block is shared over what there is
  };
  struct Exchange {  // of the handles under a block
    struct Place {
      AddrRange range;
      HandleId handle{};
    };
    AddrRange range;           // all of it gets new handles
    std::vector<Place> old;    // those that stand in it
    std::vector<Place> fresh;  // from one end to the other
  };
  struct Import {
    AddrRange range;
    std::vector<HandleId> handles;
    std::vector<AddrRange> mapped;  // where each stands, as far as it does
  };
  struct Served {
    Block* block = nullptr;
    std::optional<Error> error;  // of the driver, when that is why there is no block
  };

  // allocator.cpp
  HeapSet& heap_set(const StreamInfo& stream, PoolId pool) GPUMEMX_REQUIRES(mu_);
  Timeline& timeline(const StreamInfo& stream) GPUMEMX_REQUIRES(mu_);
  void list(Timeline& line) GPUMEMX_REQUIRES(mu_);
  Policy policy(Bytes more) const GPUMEMX_REQUIRES(mu_);
  void note_peak(Bytes live, std::int64_t requests) GPUMEMX_REQUIRES(mu_);
  Bytes reserved() const GPUMEMX_REQUIRES(mu_) {
    return {static_cast<std::uint64_t>(books_.stats.reserved_bytes.all().current)};
  }
  // As far as the fronts' figures are in the books.
  Bytes bytes_asked_for() const GPUMEMX_REQUIRES(mu_) {
    return {static_cast<std::uint64_t>(books_.stats.requested_bytes.all().current)};
  }
  bool wants_plain(const HeapSet& set) const GPUMEMX_REQUIRES(mu_);
  Block* take_hit(HeapSet& set, Bytes size, HitWaste waste) GPUMEMX_REQUIRES(mu_);
  Block* take_ready(HeapSet& set, Bytes size, ClosedEpoch& closed) GPUMEMX_REQUIRES(mu_);
  void count_in(Block& block, Front* front) GPUMEMX_REQUIRES(mu_);
  AllocResult hand_out(Block* block, const AllocRequest& request) GPUMEMX_REQUIRES(mu_);
  void hand_out_locked(Block& block, const AllocRequest& request) GPUMEMX_REQUIRES(mu_);
  bool is_parkable(Bytes size) const { return size <= options_.small_limit; }
  // Whether the short way is closed for nothing but the history, so that whoever holds the lock, and
  // writes the events, may use what is parked as the short way does.
  bool only_history_closes() const GPUMEMX_REQUIRES(mu_) {
    return history_is_on_ && gate_.reasons.load(std::memory_order_relaxed) == 1;
  }
  bool take_back(DeviceAddr address, ClosedEpoch& own, std::vector<ClosedEpoch>& others)
      GPUMEMX_REQUIRES(mu_);
  void complete_free(Block* block, Stamp freed) GPUMEMX_REQUIRES(mu_);
  bool count_freed(Block& block, bool is_pending) GPUMEMX_REQUIRES(mu_);
  void count_completed(const Block& block) GPUMEMX_REQUIRES(mu_);
  void note_pending() GPUMEMX_REQUIRES(mu_);
  void note_history() GPUMEMX_REQUIRES(mu_);
  void note_tight() GPUMEMX_REQUIRES(mu_);
  bool note_reason(bool& counted, bool is_one) GPUMEMX_REQUIRES(mu_);
  void note(EventKind kind, const Block& block) GPUMEMX_REQUIRES(mu_);

  // front.cpp
  void add_front(HeapSet& set) GPUMEMX_REQUIRES(mu_);
  Front* front_of(StreamId stream) const;
  Block* take_parked(const AllocRequest& request) GPUMEMX_EXCLUDES(mu_);
  bool park(DeviceAddr address) GPUMEMX_EXCLUDES(mu_);
  bool park_with_events(Block& block) GPUMEMX_REQUIRES(mu_);
  void unpark(HeapSet& set) GPUMEMX_REQUIRES(mu_);
  void unpark_all() GPUMEMX_REQUIRES(mu_);
  void let_count(Front& front) GPUMEMX_EXCLUDES(mu_);
  // From now on `front` may count; with null, what is in the books is all there is, until mu_ is given
  // back. REQUIRES: no front's lock is held.
  void count_on(Front* front) GPUMEMX_REQUIRES(mu_) {
    const bool may_already = front != nullptr && gate_.counts(*front);
    if (!may_already) change_counting(front);
  }
  void change_counting(Front* front) GPUMEMX_REQUIRES(mu_);
  void note_hits(Front& front) GPUMEMX_REQUIRES(mu_);
  void fold(Front& front) GPUMEMX_REQUIRES(mu_);
  void fold_locked() GPUMEMX_REQUIRES(mu_);
  void add_fronts_to(Stats& stats) const GPUMEMX_REQUIRES(mu_);
  void add_in(const Tally& tally) GPUMEMX_REQUIRES(mu_);

  // miss.cpp
  AllocResult allocate_slow(const AllocRequest& request, Bytes size)
      GPUMEMX_EXCLUDES(work_mu_, mu_);
  void poll_now_and_then(bool must) GPUMEMX_REQUIRES(work_mu_) GPUMEMX_EXCLUDES(mu_);
  bool poll_if_not_yet() GPUMEMX_REQUIRES(work_mu_, mu_);
  Served serve(HeapSet& set, Bytes size, Bytes requested) GPUMEMX_REQUIRES(work_mu_, mu_);
  Served serve_plain(HeapSet& set, Bytes size) GPUMEMX_REQUIRES(work_mu_, mu_);
  Served execute(const MissPlan& plan) GPUMEMX_REQUIRES(work_mu_, mu_);
  std::optional<Error> map_pieces(std::vector<PieceWork>& work) GPUMEMX_REQUIRES(work_mu_);
  // How far a request has gone to be served.
  struct Effort {
    int attempt = 0;
    int releases = 0;  // of handles that were to go
    bool asked = false;
  };
  bool make_room(const AllocRequest& request, Effort& effort) GPUMEMX_EXCLUDES(work_mu_, mu_);
  bool is_rejected(const AllocRequest& request, Bytes size) const GPUMEMX_REQUIRES(mu_) {
    return request.reject_above_cap && cap() < device_total_ && reserved() + size > cap();
  }
  AllocResult fail(const AllocRequest& request, Bytes size, const std::optional<Error>& error)
      GPUMEMX_EXCLUDES(work_mu_, mu_);
  bool refresh_capacity(bool only_if_tight) GPUMEMX_REQUIRES(work_mu_);

  // completion.cpp
  void record_fence(Timeline& line, std::uint64_t epoch, bool in_pool = false)
      GPUMEMX_EXCLUDES(mu_);
  bool wants_fence(const Timeline& line) const GPUMEMX_REQUIRES(mu_);
  void close_epochs(bool also_captured = false, bool beyond_limit = false) GPUMEMX_EXCLUDES(mu_);
  void close_full_epochs() GPUMEMX_EXCLUDES(mu_);
  template <class Which>
  void close_epochs_if(Which which) GPUMEMX_EXCLUDES(mu_);
  bool poll(bool thorough = true) GPUMEMX_REQUIRES(work_mu_);
  void retire_pending() GPUMEMX_REQUIRES(mu_);
  bool wait_for_any() GPUMEMX_EXCLUDES(work_mu_, mu_);
  bool wait_for(Timeline& line, EventId event, std::uint64_t epoch) GPUMEMX_EXCLUDES(mu_);

  // handles.cpp
  void drop_alias(Mapping* alias, std::vector<Unmap>& unmaps) GPUMEMX_REQUIRES(work_mu_, mu_);
  std::optional<Error> unmap_all(std::vector<Unmap>& unmaps) GPUMEMX_REQUIRES(work_mu_);
  void restore(const std::vector<Unmap>& unmaps) GPUMEMX_REQUIRES(work_mu_, mu_);
  bool release(Handle* handle) GPUMEMX_REQUIRES(work_mu_, mu_);
  void drop_complete_aliases() GPUMEMX_REQUIRES(work_mu_, mu_);
  bool can_release_later(const Handle& handle) const GPUMEMX_REQUIRES(work_mu_, mu_);
  bool maintain_once(bool release_returning) GPUMEMX_REQUIRES(work_mu_) GPUMEMX_EXCLUDES(mu_);
  bool retire_doomed() GPUMEMX_REQUIRES(work_mu_, mu_);
  bool trim_crowded() GPUMEMX_REQUIRES(work_mu_, mu_);
  bool doom_returning() GPUMEMX_REQUIRES(work_mu_, mu_);
  bool release_doomed() GPUMEMX_REQUIRES(work_mu_, mu_);
  bool release_plain(Handle* handle) GPUMEMX_REQUIRES(work_mu_, mu_);

  // pools.cpp
  bool dissolve_released_pools() GPUMEMX_REQUIRES(work_mu_, mu_);
  bool dissolve(HeapSet& set, const PrivatePool* pool) GPUMEMX_REQUIRES(work_mu_, mu_);
  bool any_pool_is_in_use() const GPUMEMX_REQUIRES(mu_);
  void keep_in_place(const Block& block) GPUMEMX_REQUIRES(mu_);
  bool keep_no_longer() GPUMEMX_REQUIRES(mu_);
  template <class Visit>
  void for_each_block_of(PoolId pool, Visit visit) const GPUMEMX_REQUIRES(mu_);
  Block* take_from_overflow_pools(const AllocRequest& request, Bytes size) GPUMEMX_REQUIRES(mu_);
  std::shared_ptr<SegmentSource> source_of(PoolId pool) const GPUMEMX_EXCLUDES(mu_);
  AllocResult allocate_from_source(SegmentSource& source, const AllocRequest& request, Bytes size)
      GPUMEMX_EXCLUDES(work_mu_, mu_);
  void release_idle_down_to(Bytes target) GPUMEMX_EXCLUDES(work_mu_, mu_);
  bool hand_back_segments() GPUMEMX_EXCLUDES(work_mu_, mu_);
  Block* ready_at(PoolId pool, DeviceAddr begin, Bytes size) GPUMEMX_REQUIRES(mu_);
  bool stands_in(PoolId pool, DeviceAddr begin, Bytes size) const GPUMEMX_REQUIRES(mu_);
  void drop_aliases_in(Heap& heap) GPUMEMX_REQUIRES(work_mu_, mu_);
  void dissolve_settled_streams(const HeapSet& keep) GPUMEMX_REQUIRES(work_mu_, mu_);

  // sharing.cpp
  std::optional<Result<SharedRange>> share_as_it_is(DeviceAddr address)
      GPUMEMX_EXCLUDES(work_mu_, mu_);
  Result<Block*> block_in_use(DeviceAddr address) const GPUMEMX_REQUIRES(mu_);
  BackingPart part_of(const Mapping& mapping, const Block& block) const GPUMEMX_REQUIRES(mu_);
  bool is_fixed(const Region& region, DeviceAddr page) const GPUMEMX_REQUIRES(mu_);
  Neighbour neighbour_at(const Region& region, DeviceAddr border, bool behind) const
      GPUMEMX_REQUIRES(mu_);
  SharePlan plan_share(const Block& block) const GPUMEMX_REQUIRES(mu_);
  Result<SharedRange> export_block(Block& block) GPUMEMX_REQUIRES(work_mu_, mu_);
  std::optional<Error> make_room_for_copy(const SharePlan& plan) GPUMEMX_REQUIRES(work_mu_, mu_);
  std::optional<Error> replace_backing(Block& block) GPUMEMX_REQUIRES(work_mu_, mu_);
  std::optional<Error> exchange_memory(Exchange& work) GPUMEMX_REQUIRES(work_mu_);
  void close_ended_imports() GPUMEMX_EXCLUDES(work_mu_);
  bool unmap_for_good(AddrRange range) GPUMEMX_REQUIRES(work_mu_);
  void drop(const Import& import) GPUMEMX_REQUIRES(work_mu_);
  void drop_imports() GPUMEMX_EXCLUDES(work_mu_);

  // memory_report.cpp
  class MappingsInUse;
  Bytes releasable(bool wait) const GPUMEMX_REQUIRES(work_mu_, mu_);
  void add_causes(MemoryReport& report) const GPUMEMX_REQUIRES(mu_);

  // trim.cpp
  bool released_pools_have_idle() const GPUMEMX_REQUIRES(mu_);
  TrimReport trim_cache(const TrimRequest& request) GPUMEMX_EXCLUDES(work_mu_, mu_);
  void wait_for_idle_memory() GPUMEMX_EXCLUDES(work_mu_, mu_);
  Bytes release_idle(Bytes target) GPUMEMX_REQUIRES(work_mu_, mu_);
  Bytes release_idle_plain(Bytes target) GPUMEMX_REQUIRES(work_mu_, mu_);
  MemoryFigures figures() const GPUMEMX_REQUIRES(mu_);
  MemoryFigures read_figures() const GPUMEMX_REQUIRES(mu_);  // REQUIRES: all fronts are closed
  void for_each_waiting(const std::function<void(const Stamp& last_use, Bytes size)>& visit) const
      GPUMEMX_REQUIRES(mu_);
  void gather_layout(std::optional<PoolId> pool, MemoryLayout& out) const GPUMEMX_REQUIRES(mu_);
  void add_device(MemoryFigures& figures, const std::optional<DeviceMemory>& memory) const;

  DeviceDriver& driver_;
  const Options options_;
  std::function<void()> maintenance_hook_;
  Bytes device_total_{~0ull};  // set once, by the constructor; ~0 when the device did not say
  std::atomic<std::uint64_t> cap_;
  std::atomic<bool> shut_down_{false};
  std::atomic<bool> plain_mode_{false};
  std::atomic<int> captures_{0};
  std::atomic<int> recording_{0};          // threads that record an event; see begin_capture()
  std::atomic<bool> has_returned_{false};  // whether returned_ may hold something
  std::atomic<std::size_t> pending_count_{0};
  std::atomic<int> wanting_work_{0};  // allocating threads that wait for work_mu_ or hold it

  Gate gate_;
  alignas(kCacheLine) std::atomic<int> letting_count_{0};  // threads in let_count()
  std::atomic<bool> is_inside_{false};  // one is in allocate() or free() and holds mu_

  mutable Mutex work_mu_;
  CandidateSearch search_ GPUMEMX_GUARDED_BY(work_mu_);
  int vm_failures_ GPUMEMX_GUARDED_BY(work_mu_) = 0;
  // poll_now_and_then(): whether this miss has asked, whether all that was asked for last was still under
  // way, and how many misses have not asked since.
  bool has_polled_ GPUMEMX_GUARDED_BY(work_mu_) = false;
  bool polled_in_vain_ GPUMEMX_GUARDED_BY(work_mu_) = false;
  int misses_unpolled_ GPUMEMX_GUARDED_BY(work_mu_) = 0;
  std::vector<Handle*> doomed_ GPUMEMX_GUARDED_BY(work_mu_);         // to be released by maintain()
  std::vector<std::uint32_t> crowded_ GPUMEMX_GUARDED_BY(work_mu_);  // handles with many aliases
  std::vector<int> peers_ GPUMEMX_GUARDED_BY(work_mu_);  // devices that may use all that is mapped
  std::map<DeviceAddr, Import> imports_ GPUMEMX_GUARDED_BY(work_mu_);
  std::vector<DeviceAddr> ended_imports_
      GPUMEMX_GUARDED_BY(work_mu_);  // to be closed after a capture

  mutable Mutex mu_;
  alignas(kCacheLine) Books books_ GPUMEMX_GUARDED_BY(mu_);  // begins with what park() reads
  const AddrRange addresses_;                                // the arena's, for owns()
  const Arena& arena_;  // of the books, for Arena::find_unlocked()
  const Slab<Block>& records_;
  std::unordered_map<StreamId, std::unique_ptr<Timeline>> timelines_ GPUMEMX_GUARDED_BY(mu_);
  std::vector<Timeline*> timeline_list_ GPUMEMX_GUARDED_BY(mu_);  // in the order of first use
  std::unordered_map<SetKey, std::unique_ptr<HeapSet>, SetKeyHash> sets_ GPUMEMX_GUARDED_BY(mu_);
  std::vector<HeapSet*> default_sets_ GPUMEMX_GUARDED_BY(mu_);
  std::vector<HeapSet*> fronted_ GPUMEMX_GUARDED_BY(mu_);  // those with a front
  int closings_left_ GPUMEMX_GUARDED_BY(mu_) = 0;          // until one front is to count again
  bool history_is_on_ GPUMEMX_GUARDED_BY(mu_) = false;     // reasons of gate_
  bool is_tight_ GPUMEMX_GUARDED_BY(mu_) = false;
  std::size_t temporary_sets_ GPUMEMX_GUARDED_BY(mu_) =
      0;  // of them, on streams that are not permanent
  std::size_t temporary_limit_ GPUMEMX_GUARDED_BY(mu_) =
      kTemporarySets;  // more: look for dead ones
  HeapSet* last_set_ GPUMEMX_GUARDED_BY(mu_) =
      nullptr;  // of the last request: mostly the next's too
  std::map<PoolId, PrivatePool> pools_ GPUMEMX_GUARDED_BY(mu_);
  std::uint64_t last_pool_ GPUMEMX_GUARDED_BY(mu_) = 0;
  int overflow_pools_ GPUMEMX_GUARDED_BY(mu_) = 0;           // of them, with use_on_oom
  std::vector<std::uint32_t> kept_ GPUMEMX_GUARDED_BY(mu_);  // ids of handles
  std::vector<Returned> returned_ GPUMEMX_GUARDED_BY(mu_);
  std::vector<PendingBlock> pending_ GPUMEMX_GUARDED_BY(mu_);
  Bytes peak_live_ GPUMEMX_GUARDED_BY(mu_);  // the policy's own: torch's peak is reset by users
  Bytes peak_at_mark_ GPUMEMX_GUARDED_BY(mu_);
  std::int64_t requests_since_mark_ GPUMEMX_GUARDED_BY(mu_) = 0;
  bool has_settled_ GPUMEMX_GUARDED_BY(mu_) = false;
  Bytes interval_peak_ GPUMEMX_GUARDED_BY(mu_);
  Bytes device_capacity_ GPUMEMX_GUARDED_BY(mu_){~0ull};  // reserved + free when last asked
  std::uint64_t fence_serial_ GPUMEMX_GUARDED_BY(mu_) = 0;
  std::uint64_t returning_mark_ GPUMEMX_GUARDED_BY(mu_) = 0;  // idle since before: on its way back
  std::vector<Observer*> observers_ GPUMEMX_GUARDED_BY(mu_);
};

}  // namespace gpumemx
