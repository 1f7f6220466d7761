// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/history.hpp"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>

#include "adapter/convert.hpp"
#include "adapter/pool_names.hpp"

namespace gpumemx::adapter {

namespace {

using c10::CachingDeviceAllocator::TraceEntry;

DeviceAddr address_of(const void* ptr) { return {reinterpret_cast<std::uintptr_t>(ptr)}; }

std::int64_t approximate_time() { return static_cast<std::int64_t>(c10::getApproximateTime()); }

// --- Stacks that nobody needs any more
//
// Destroying one gives Python objects back, through a mutex of torch's that is held while Python code
// may run (a code object's end can be anybody's callback, which may free a tensor). So the last
// reference to a stack must not go under a lock of the allocator, although that is where blocks and
// entries let go of theirs. The core therefore holds a Held, whose end is to be pushed on this list;
// the next call that is outside of the core destroys what is there.
struct Held final : Context {
  explicit Held(std::shared_ptr<c10::GatheredContext> s) : stack(std::move(s)) {}
  void unreferenced() noexcept override;

  const std::shared_ptr<c10::GatheredContext> stack;
  Held* next = nullptr;
};
std::atomic<Held*> the_unneeded{nullptr};

void Held::unreferenced() noexcept {
  // It was taken long ago, and its end comes soon.
  __builtin_prefetch(stack.get(), /*rw=*/1);
  next = the_unneeded.load(std::memory_order_relaxed);
  while (!the_unneeded.compare_exchange_weak(next, this, std::memory_order_release,
                                             std::memory_order_relaxed)) {
  }
}

void destroy_unneeded() {
  if (the_unneeded.load(std::memory_order_relaxed) == nullptr) return;
  Held* held = the_unneeded.exchange(nullptr, std::memory_order_acquire);
  while (held != nullptr) delete std::exchange(held, held->next);
}

ContextRef hold(std::shared_ptr<c10::GatheredContext> stack) {
  return stack == nullptr ? ContextRef() : ContextRef(new Held(std::move(stack)));
}

// --- What the program says, by thread

// As text for the entries; made when it changes, shared by all entries until then.
struct Remark {
  std::string compile_context;
  std::string user_metadata;
};

struct Said {
  std::vector<std::string> compile_contexts;
  std::string user_metadata;
  std::shared_ptr<const Remark> remark;  // null: nothing is said

  void changed() {
    if (compile_contexts.empty() && user_metadata.empty()) {
      remark = nullptr;
      return;
    }
    remark = std::make_shared<const Remark>(
        Remark{compile_contexts.empty() ? "" : compile_contexts.back(), user_metadata});
  }
};

// A plain pointer can still be read when the thread's own variables are gone: tensors that they held
// are freed after that.
constinit thread_local Said* said_here = nullptr;

Said& said() {
  struct Owner {
    ~Owner() { delete std::exchange(said_here, nullptr); }
  };
  thread_local const Owner owner;
  if (said_here == nullptr) said_here = new Said;
  return *said_here;
}

std::shared_ptr<const Remark> remark_here() {
  return said_here == nullptr ? nullptr : said_here->remark;
}

// What a tracker threw on this thread, under a device's lock; for who is outside of it.
constinit thread_local std::exception_ptr* failure_here = nullptr;

// --- Events in torch's words

// `Entry` is TraceEntry; a parameter, since its last actions depend on the version.
template <class Entry>
typename Entry::Action action_of(EventKind kind) {
  switch (kind) {
    case EventKind::kAlloc: return Entry::ALLOC;
    case EventKind::kFreeRequested: return Entry::FREE_REQUESTED;
    case EventKind::kFreeCompleted: return Entry::FREE_COMPLETED;
    case EventKind::kSegmentAlloc: return Entry::SEGMENT_ALLOC;
    case EventKind::kSegmentFree: return Entry::SEGMENT_FREE;
    case EventKind::kSegmentMap: return Entry::SEGMENT_MAP;
    case EventKind::kSegmentUnmap: return Entry::SEGMENT_UNMAP;
    case EventKind::kOutOfMemory: return Entry::OOM;
    case EventKind::kSnapshot: return Entry::SNAPSHOT;
    case EventKind::kAnnotate:
      if constexpr (requires { Entry::ANNOTATE; }) return Entry::ANNOTATE;
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "gpumemx: this torch has no entry for event ",
                        static_cast<int>(kind));
}

EventKind kind_of(TraceEntry::Action action) {
  for (int i = 0; i < kEventKinds; ++i) {
    const auto kind = static_cast<EventKind>(i);
    // The one kind that not every torch has comes last, so it is reached only where it exists.
    if (action_of<TraceEntry>(kind) == action) return kind;
  }
  TORCH_CHECK(false, "gpumemx records no events of torch's kind ", static_cast<int>(action));
}

TraceEntry trace_entry(c10::DeviceIndex device, const HistoryEvent& e) {
  const auto* remark = static_cast<const Remark*>(e.remark.get());
  const bool compiled = remark != nullptr && !remark->compile_context.empty();
  return {action_of<TraceEntry>(e.kind),
          device,
          e.address.n,
          e.size.n,
          reinterpret_cast<void*>(e.stream.native),  // NOLINT: a CUstream
          PoolNames::instance().of(device, e.pool),
          static_cast<c10::approx_time_t>(e.time),
          gathered(e.context),
          compiled ? remark->compile_context : "N/A",
          remark == nullptr ? "" : remark->user_metadata};
}

}  // namespace

std::shared_ptr<c10::GatheredContext> gathered(const ContextRef& context) {
  return context == nullptr ? nullptr : static_cast<const Held*>(context.get())->stack;
}

MemoryHistory::MemoryHistory(DeviceRegistry& devices) : devices_(devices) {
  for (std::size_t i = 0; i < listeners_.size(); ++i) {
    listeners_[i].owner = this;
    listeners_[i].device = static_cast<c10::DeviceIndex>(i);
  }
}

// --- scopes

Cause MemoryHistory::gather(torch_alloc::RecordContext level) const {
  destroy_unneeded();
  Cause cause;
  cause.remark = remark_here();
  if (when_.load(std::memory_order_relaxed) >= level) {
    if (const auto recorder = recorder_.load(std::memory_order_relaxed)) {
      cause.context = hold(recorder());
    }
  }
  return cause;
}

std::exception_ptr Because::take() {
  const std::unique_ptr<std::exception_ptr> failure(std::exchange(failure_here, nullptr));
  return failure == nullptr ? nullptr : *failure;
}

void Because::leave() {
  open_.reset();
  const std::exception_ptr failure = take();
  if (failure == nullptr) return;
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    LOG(ERROR) << "gpumemx: a tracker of memory events failed: " << error.what();
  } catch (...) {
    LOG(ERROR) << "gpumemx: a tracker of memory events failed";
  }
}

// --- settings

void MemoryHistory::record(bool enabled, torch_alloc::CreateContextFn recorder,
                           std::size_t max_entries, torch_alloc::RecordContext when, bool clear,
                           const std::vector<std::string>& skip_actions) {
  TORCH_CHECK(when == torch_alloc::RecordContext::NEVER || recorder != nullptr,
              "a history with stacks needs a function that takes them");
  Rings rings;
  for (const std::string& name : skip_actions) {
    const auto action = c10::CachingDeviceAllocator::parseTraceEntryAction(name);
    rings.rules.skipped |= 1u << static_cast<int>(kind_of(action));
  }
  rings.capacity = enabled ? std::max<std::size_t>(max_entries, 1) : 0;
  rings.rules.contexts = when >= torch_alloc::RecordContext::ALLOC;
  {
    MutexLock lock(mu_);
    rings_ = rings;
    recorder_ = enabled ? recorder : nullptr;
    when_ = enabled ? when : torch_alloc::RecordContext::NEVER;
    recording_ = enabled;
    watching_ = enabled || trackers_.load() != nullptr;
  }
  {
    MutexLock lock(marks_mu_);
    if (enabled && !clear && marks_.capacity() != 0) {
      marks_.resize(rings.capacity);
    } else {
      marks_.reset(rings.capacity);
    }
  }
  apply_to_all(/*keep=*/!clear);
  destroy_unneeded();
}

void MemoryHistory::attach(torch_alloc::AllocatorTraceTracker tracker) {
  {
    MutexLock lock(mu_);
    const Trackers* before = trackers_.load();
    auto* all = before == nullptr ? new Trackers : new Trackers(*before);
    all->push_back(std::move(tracker));
    trackers_.store(all, std::memory_order_release);
    watching_ = true;
  }
  // Takes the lock of every device, so no event that begins later misses the new tracker.
  apply_to_all(/*keep=*/true);
}

void MemoryHistory::apply_to_all(bool keep) {
  if (devices_.is_shut_down()) return;
  devices_.apply_to_all([this, keep](int index, Device& device) { apply(index, device, keep); });
}

void MemoryHistory::apply(int index, Device& device, bool keep) {
  Rings rings;
  {
    MutexLock lock(mu_);
    rings = rings_;
  }
  device.allocator->record_history(rings.capacity, &approximate_time, rings.rules, keep);
  if (trackers_.load() != nullptr) {
    device.allocator->listen(&listeners_[static_cast<std::size_t>(index)], &approximate_time);
  }
}

void MemoryHistory::Listener::on_event(const HistoryEvent& event) {
  const Trackers* trackers = owner->trackers_.load(std::memory_order_acquire);
  if (event.kind == EventKind::kSegmentUnmap) owner->withdraw(device, event, *trackers);
  try {
    const TraceEntry entry = trace_entry(device, event);
    for (const auto& tracker : *trackers) tracker(entry);
  } catch (...) {
    if (failure_here == nullptr) failure_here = new std::exception_ptr(std::current_exception());
  }
}

// NCCL deregisters what is freed, and would go on moving words to and from the memory that it knows,
// wherever that stands by then. It knows segments as a snapshot showed them, and no part of one.
void MemoryHistory::withdraw(c10::DeviceIndex device, const HistoryEvent& event,
                             const Trackers& trackers) {
  std::vector<std::pair<DeviceAddr, Registered>> gone;
  {
    const MutexLock lock(registered_mu_);
    std::map<DeviceAddr, Registered>& known = registered_[static_cast<std::size_t>(device)];
    auto at = known.upper_bound(event.address);
    if (at != known.begin()) --at;
    while (at != known.end() && at->first < event.address + event.size) {
      if (at->first + at->second.size > event.address) {
        gone.emplace_back(*at);
        at = known.erase(at);
      } else {
        ++at;
      }
    }
  }
  for (const auto& [address, segment] : gone) {
    HistoryEvent freed = event;
    freed.kind = EventKind::kSegmentFree;
    freed.address = address;
    freed.size = segment.size;
    TraceEntry entry = trace_entry(device, freed);
    entry.mempool_ = segment.pool;
    for (const auto& tracker : trackers) {
      try {
        tracker(entry);
      } catch (...) {
        if (failure_here == nullptr) {
          failure_here = new std::exception_ptr(std::current_exception());
        }
      }
    }
  }
}

// --- what the program says

void MemoryHistory::add_mark(c10::DeviceIndex device,
                             const std::vector<std::pair<std::string, std::string>>& metadata) {
  // A forked child has nothing to record, and the lock may be held by a thread that it lacks.
  if (!recording() || devices_.is_shut_down()) return;
  Mark mark(device, c10::getApproximateTime());
  for (const auto& [name, value] : metadata) mark.recordUserMetadata(name, value);
  MutexLock lock(marks_mu_);
  if (marks_.capacity() != 0) marks_.push(std::move(mark));
}

void MemoryHistory::push_compile_context(std::string context) {
  Said& here = said();
  here.compile_contexts.push_back(std::move(context));
  here.changed();
}

void MemoryHistory::pop_compile_context() {
  Said& here = said();
  if (here.compile_contexts.empty()) return;
  here.compile_contexts.pop_back();
  here.changed();
}

void MemoryHistory::set_user_metadata(std::string metadata) {
  Said& here = said();
  here.user_metadata = std::move(metadata);
  here.changed();
}

std::string MemoryHistory::user_metadata() {
  return said_here == nullptr ? "" : said_here->user_metadata;
}

void MemoryHistory::annotate(const void* ptr, const std::string& metadata) {
  if (!watching() || devices_.is_shut_down()) return;
  const int device = devices_.owner_of(address_of(ptr));
  Cause cause = gather(torch_alloc::RecordContext::ALLOC);
  const auto* said = static_cast<const Remark*>(cause.remark.get());
  cause.remark = std::make_shared<const Remark>(
      Remark{said == nullptr ? "" : said->compile_context, metadata});
  const Because because(std::move(cause));
  TORCH_CHECK(device >= 0 && devices_.if_open(device)->allocator->annotate(address_of(ptr)),
              "annotateMemory: no live allocation found at pointer ", text_of(ptr));
}

// --- looking at it

std::shared_ptr<c10::GatheredContext> MemoryHistory::context_of(const void* ptr) const {
  if (ptr == nullptr || devices_.is_shut_down()) return nullptr;
  const int device = devices_.owner_of(address_of(ptr));
  if (device < 0) return nullptr;
  const auto block = devices_.if_open(device)->allocator->find_block(address_of(ptr));
  return block ? gathered(block->context) : nullptr;
}

void MemoryHistory::snapshot(const PoolOf& only_pool, bool include_traces, bool registers,
                             torch_alloc::SnapshotInfo& out) {
  const int devices = devices_.device_count();
  if (include_traces) out.device_traces.resize(static_cast<std::size_t>(devices));
  if (devices_.is_shut_down()) return;
  destroy_unneeded();
  const Cause no_stack{nullptr, remark_here()};
  const CauseScope scope(no_stack);  // of the entries that say that somebody looked
  std::function<c10::time_t(c10::approx_time_t)> to_ns;
  const auto to_us = [&](c10::approx_time_t time) { return to_ns(time) / 1000; };
  if (include_traces && recording()) {
    to_ns = clock_.makeConverter();
    MutexLock lock(marks_mu_);
    for (std::size_t i = 0; i < marks_.size(); ++i) {
      out.external_annotations.push_back(marks_[i]);
      auto& time = out.external_annotations.back().time_;
      time.t_ = to_us(time.approx_t_);
    }
  }
  const bool of_allocated = when_.load() == torch_alloc::RecordContext::STATE;
  for (int i = 0; i < devices; ++i) {
    const Device* device = devices_.if_open(i);
    if (device == nullptr) continue;
    const auto index = static_cast<c10::DeviceIndex>(i);
    std::optional<PoolId> only;
    if (only_pool) {
      only = only_pool(index);
      if (!only) continue;  // this device has nothing of it
    }
    const MemoryLayout layout = device->allocator->layout(only);
    for (auto& segment : to_torch(index, layout)) {
      // Asked for are the stacks of what is allocated.
      if (of_allocated && segment.active_size == 0) segment.context_when_allocated = nullptr;
      if (registers && segment.is_expandable) {
        const MutexLock lock(registered_mu_);
        registered_[static_cast<std::size_t>(i)][{segment.address}] = {
            {segment.total_size}, segment.owner_private_pool_id};
      }
      out.segments.push_back(std::move(segment));
    }
    if (to_ns) {
      auto& trace = out.device_traces[static_cast<std::size_t>(i)];
      const std::vector<HistoryEvent> events = device->allocator->history(layout.events);
      trace.reserve(events.size());
      for (const HistoryEvent& event : events) {
        trace.push_back(trace_entry(index, event));
        trace.back().time_.t_ = to_us(trace.back().time_.approx_t_);
      }
    }
    device->allocator->note_snapshot(layout.active, only.value_or(kDefaultPool));
  }
}

}  // namespace gpumemx::adapter
