// SPDX-License-Identifier: BSD-3-Clause
//
// Each driver call in four steps: announce it (outside the lock), begin it, carry it out or refuse
// it, charge it.
#include "driver/sim/sim_driver.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace gpumemx {

namespace {

Error shutting_down(DriverCall call) {
  return {Errc::kShuttingDown, {}, std::string("SimDriver::") + to_string(call)};
}

Refusal misuse(std::string reason) { return {Errc::kInvalidArgument, std::move(reason), true}; }

bool is_multiple(std::uint64_t n, Bytes step) { return n != 0 && n % step.n == 0; }

std::string graph_text(GraphId graph) {
  return "graph " + std::to_string(static_cast<std::uint64_t>(graph));
}

}  // namespace

SimDriver::SimDriver(const SimOptions& options)
    : options_(options),
      traits_{options.granularity, options.virtual_memory,
              options.virtual_memory && options.exportable},
      memory_(options_),
      streams_(options.check_hazards,
               [this](StreamId stream, const SimStreams::Item& item) { run(stream, item); }) {}

SimDriver::~SimDriver() = default;

bool SimDriver::announce(DriverCall call) {
  if (is_shut_down_.load(std::memory_order_relaxed)) {
    calls_after_shutdown_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  if (!has_hook_.load(std::memory_order_acquire)) return true;
  std::shared_ptr<const std::function<void(DriverCall)>> hook;
  {
    MutexLock lock(hook_mu_);
    hook = hook_;
  }
  if (hook) (*hook)(call);
  return true;
}

std::optional<Error> SimDriver::begin(DriverCall call, Bytes size) {
  // Again: the hook may have held this call back until after the shutdown.
  if (is_shut_down_.load(std::memory_order_relaxed)) return shutting_down(call);
  ++serial_;
  streams_.catch_up();
  if (!faults_.strikes(call)) return std::nullopt;
  meter_.charge(call, 0, false);
  const bool is_memory = call == DriverCall::kCreate || call == DriverCall::kSetAccess ||
                         call == DriverCall::kAllocate;
  return Error{is_memory ? Errc::kOutOfMemory : Errc::kDriverFailure, size,
               std::string("SimDriver::") + to_string(call) + ": failed on demand"};
}

std::optional<Error> SimDriver::begin_virtual(DriverCall call, Bytes size) {
  if (auto error = begin(call, size)) return error;
  if (options_.virtual_memory) return std::nullopt;
  return refuse({call, serial_, {}}, {Errc::kUnsupported, "no virtual memory on this device"});
}

Error SimDriver::refuse(const PastCall& call, const Refusal& why) {
  meter_.charge(call.call, 0, false);
  std::string text = describe(call) + ": " + why.reason;
  if (why.is_hazard) note(text);
  return {why.code, call.range.size, "SimDriver::" + std::move(text)};
}

void SimDriver::charge(DriverCall call, HandleId handle, Bytes size) {
  meter_.charge(call, options_.costs.microseconds(call, size) * 1e-6, true, handle, size);
}

void SimDriver::note(std::string hazard) {
  if (options_.check_hazards) hazards_.add(std::move(hazard));
}

std::optional<Error> SimDriver::refuse_if_captures_forbid(DriverCall call) {
  const auto ended = captures_.invalidate_for_caller();
  if (ended.empty()) return std::nullopt;
  return refuse({call, serial_, {}},
                misuse("ends the capture of " + describe(ended.front()->stream.id) +
                       ", begun by begin_capture #" + std::to_string(ended.front()->serial)));
}

std::optional<Refusal> SimDriver::unusable(StreamRef stream) const {
  if (streams_.is_alive(stream)) return std::nullopt;
  const std::uint64_t by = streams_.destroyed_by(stream);
  if (by != 0) {
    return misuse(describe(stream.id) + " was destroyed by destroy_stream #" + std::to_string(by));
  }
  return misuse(describe(stream.id) + " is not a stream of this device");
}

std::optional<Refusal> SimDriver::unknown(EventId event) const {
  if (streams_.find(event) != nullptr) return std::nullopt;
  const std::uint64_t by = streams_.recycled_by(event);
  return misuse("event " + std::to_string(static_cast<std::uint64_t>(event)) + " is not live" +
                (by == 0 ? std::string() : ", recycled by recycle #" + std::to_string(by)));
}

std::optional<Refusal> SimDriver::unusable(EventId event) {
  if (auto why = unknown(event)) return why;
  if (!streams_.find(event)->captured) return std::nullopt;
  ++lost_events_asked_;
  return Refusal{Errc::kCaptureActive, "a capture has the event"};
}

Result<AddrRange> SimDriver::reserve(Bytes size, Bytes alignment) {
  constexpr auto kCall = DriverCall::kReserve;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall, size)) return *error;
  if (!is_multiple(size.n, traits_.granularity) || !std::has_single_bit(alignment.n) ||
      alignment < traits_.granularity) {
    return refuse({kCall, serial_, {{}, size}}, misuse("size or alignment is not allowed"));
  }
  const Result<AddrRange> range = memory_.reserve(size, alignment);
  if (!range.ok()) {
    return refuse({kCall, serial_, {{}, size}}, {range.error().code, range.error().where});
  }
  charge(kCall);
  return range;
}

Status SimDriver::unreserve(AddrRange range) {
  constexpr auto kCall = DriverCall::kUnreserve;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall, range.size)) return *error;
  if (auto why = memory_.unreserve(range, serial_)) return refuse({kCall, serial_, range}, *why);
  charge(kCall);
  return ok_status();
}

Result<HandleId> SimDriver::create(Bytes size) {
  constexpr auto kCall = DriverCall::kCreate;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall, size)) return *error;
  const PastCall call{kCall, serial_, {{}, size}};
  if (!is_multiple(size.n, traits_.granularity)) {
    return refuse(call, misuse("the size is not a positive multiple of the granularity"));
  }
  if (memory_.free() < size) return refuse(call, {Errc::kOutOfMemory, "the device is full"});
  const HandleId handle = memory_.create(size);
  charge(kCall, handle, size);
  return handle;
}

Status SimDriver::release(HandleId handle) {
  constexpr auto kCall = DriverCall::kRelease;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall)) return *error;
  const Bytes size = memory_.size_of(handle).value_or(Bytes{});
  if (auto why = memory_.release(handle, serial_)) {
    return refuse({kCall, serial_, {}, handle}, *why);
  }
  charge(kCall, handle, size);
  return ok_status();
}

Status SimDriver::map(AddrRange range, HandleId handle) {
  constexpr auto kCall = DriverCall::kMap;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall, range.size)) return *error;
  if (auto why = memory_.map(range, handle, serial_)) {
    return refuse({kCall, serial_, range, handle}, *why);
  }
  charge(kCall, handle, range.size);
  return ok_status();
}

Status SimDriver::set_access(AddrRange range, const std::vector<int>& peers) {
  constexpr auto kCall = DriverCall::kSetAccess;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall, range.size)) return *error;
  if (auto why = memory_.set_access(range, peers)) return refuse({kCall, serial_, range}, *why);
  // Not measured with peers: the driver has as many page tables to write as there are devices.
  memory_.for_each_in(range, [&](const SimMemory::Mapping& mapping) GPUMEMX_NO_TSA {
    const double us = options_.costs.microseconds(kCall, mapping.size);
    meter_.charge(kCall, us * 1e-6 * static_cast<double>(1 + peers.size()), true, mapping.handle,
                  mapping.size);
  });
  return ok_status();
}

Status SimDriver::unmap(AddrRange range) {
  constexpr auto kCall = DriverCall::kUnmap;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall, range.size)) return *error;
  note_queued_uses({kCall, serial_, range}, range.begin);
  if (auto why = memory_.unmap(range, serial_)) return refuse({kCall, serial_, range}, *why);
  charge(kCall, {}, range.size);
  return ok_status();
}

// The driver does not notice such an unmap (or copy) either: the work finds out.
void SimDriver::note_queued_uses(const PastCall& call, DeviceAddr begin) {
  if (!options_.check_hazards) return;
  const SimMemory::Mapping* mapping = memory_.find(begin);
  const AddrRange range{begin, mapping == nullptr ? Bytes{} : mapping->size};
  if (mapping == nullptr || (call.call == DriverCall::kUnmap && range != call.range)) return;
  for (const LastUse& use : mapping->uses) {
    const SimStreams::Item* item = streams_.find(use.stream, use.seq);
    if (item == nullptr || streams_.is_held(use.stream)) continue;
    const auto access = std::find_if(
        item->accesses.begin(), item->accesses.end(),
        [&](const Access& a) { return a.range.overlaps(range) && a.range.overlaps(call.range); });
    if (access == item->accesses.end()) continue;
    PastCall named = call;
    named.handle = mapping->handle;
    note(describe(named) + ": still used by " + describe_work(use.stream, *item, *access) +
         ", which has not run");
  }
}

Result<int> SimDriver::export_handle(HandleId handle) {
  constexpr auto kCall = DriverCall::kExport;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall)) return *error;
  const PastCall call{kCall, serial_, {}, handle};
  if (!traits_.exportable) return refuse(call, {Errc::kUnsupported, "handles stay in the process"});
  if (!memory_.size_of(handle)) return refuse(call, misuse("no such handle"));
  const std::optional<int> fd = memory_.export_handle(handle);
  if (!fd) return refuse(call, {Errc::kDriverFailure, "no file can be opened"});
  charge(kCall, handle);
  return *fd;
}

Result<HandleId> SimDriver::import_handle(int fd) {
  constexpr auto kCall = DriverCall::kImport;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall)) return *error;
  const std::optional<HandleId> handle = memory_.import_handle(fd);
  if (!handle) return refuse({kCall, serial_, {}}, misuse("no memory behind this descriptor"));
  charge(kCall, *handle);
  return *handle;
}

Result<HandleId> SimDriver::import_fabric(const FabricHandle&) {
  constexpr auto kCall = DriverCall::kImport;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin_virtual(kCall)) return *error;
  return refuse({kCall, serial_, {}}, {Errc::kUnsupported, "no fabric on this machine"});
}

Result<DeviceAddr> SimDriver::allocate(Bytes size) {
  constexpr auto kCall = DriverCall::kAllocate;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall, size)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  const PastCall call{kCall, serial_, {{}, size}};
  if (size.n == 0) return refuse(call, misuse("the size is zero"));
  const std::optional<DeviceAddr> address = memory_.allocate(size, serial_);
  if (!address) return refuse(call, {Errc::kOutOfMemory, "the device is full"});
  charge(kCall, {}, size);
  return *address;
}

Status SimDriver::free(DeviceAddr address) {
  constexpr auto kCall = DriverCall::kFree;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  finish_all();
  if (auto why = memory_.free(address, serial_)) {
    return refuse({kCall, serial_, {address, {}}}, *why);
  }
  charge(kCall);
  return ok_status();
}

void SimDriver::finish_all() {
  const std::int64_t idle_at = streams_.last_due();
  if (idle_at > streams_.now()) {
    ++waits_;
    waited_us_ += idle_at - streams_.now();
    (void)streams_.move_clock(idle_at);
  }
  streams_.complete_all();
}

Status SimDriver::synchronize() {
  constexpr auto kCall = DriverCall::kSynchronize;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  finish_all();
  charge(kCall);
  return ok_status();
}

Status SimDriver::copy(DeviceAddr to, DeviceAddr from, Bytes size) {
  constexpr auto kCall = DriverCall::kCopy;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall, size)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  const PastCall call{kCall, serial_, {to, size}};
  if (size.n == 0 || size.n % Contents::kGranule != 0) {
    return refuse(call, misuse("the size is not a positive multiple of 512"));
  }
  if (AddrRange{from, size}.overlaps({to, size})) return refuse(call, misuse("the ranges overlap"));
  for (const AddrRange range : {AddrRange{to, size}, AddrRange{from, size}}) {
    std::vector<DeviceAddr> begins;
    memory_.for_each_begin_in(range, [&](DeviceAddr begin) { begins.push_back(begin); });
    for (const DeviceAddr begin : begins) note_queued_uses({kCall, serial_, range}, begin);
  }
  if (auto wrong = memory_.copy(to, from, size)) return refuse(call, misuse(*wrong));
  charge(kCall, {}, size);
  return ok_status();
}

Result<HoldId> SimDriver::hold(const std::vector<StreamRef>& streams) {
  constexpr auto kCall = DriverCall::kHold;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  for (const StreamRef stream : streams) {
    if (auto why = unusable(stream)) return refuse({kCall, serial_, {}}, *why);
    if (captures_.find(stream.id) != nullptr) {
      return refuse({kCall, serial_, {}},
                    {Errc::kCaptureActive, describe(stream.id) + " is capturing"});
    }
  }
  for (const StreamRef stream : streams) {
    streams_.complete(stream.id, UINT64_MAX);
    streams_.hold(stream.id);
  }
  charge(kCall);
  const HoldId id{serial_};
  holds_.emplace(id, streams);
  return id;
}

void SimDriver::let_go(HoldId hold) {
  MutexLock lock(mu_);
  ++serial_;
  const auto found = holds_.find(hold);
  if (found == holds_.end()) return note("let_go #" + std::to_string(serial_) + ": no such hold");
  for (const StreamRef stream : found->second) streams_.let_go(stream.id);
  holds_.erase(found);
  streams_.catch_up();
}

StreamRef SimDriver::stream_with(std::uint64_t native) const {
  MutexLock lock(mu_);
  return {streams_.alive_with(native), native};
}

Result<StreamId> SimDriver::stream_id(std::uint64_t native) {
  if (is_shut_down_) return Error{Errc::kShuttingDown, {}, "stream_id"};
  MutexLock lock(mu_);
  const StreamId id = streams_.alive_with(native);
  if (id == StreamId{})
    return Error{Errc::kInvalidArgument, {}, "stream_id: no stream has this handle"};
  if (const auto* capture = captures_.find(id)) return id_in_capture(native, capture->serial);
  return id;
}

Result<EventId> SimDriver::record(StreamRef stream) {
  constexpr auto kCall = DriverCall::kRecord;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  const PastCall call{kCall, serial_, {}};
  if (auto why = unusable(stream)) return refuse(call, *why);
  if (captures_.find(stream.id) != nullptr) {
    return refuse(call, {Errc::kCaptureActive, describe(stream.id) + " is capturing"});
  }
  charge(kCall);
  const EventId event = streams_.record(stream, serial_, std::exchange(lose_next_event_, false));
  streams_.catch_up();
  return event;
}

Result<bool> SimDriver::query(EventId event) {
  constexpr auto kCall = DriverCall::kQuery;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  if (auto why = unusable(event)) return refuse({kCall, serial_, {}}, *why);
  charge(kCall);
  return streams_.done(*streams_.find(event));
}

// An item that is still queued knows better when it is due: manual mode may have ended.
std::int64_t SimDriver::due(const SimStreams::Event& event) const {
  if (streams_.done(event)) return INT64_MIN;
  const SimStreams::Item* item = streams_.find(event.stream, event.seq);
  return item != nullptr ? item->due : event.due;
}

void SimDriver::wait_until(const SimStreams::Event& event) {
  if (streams_.done(event)) return;
  ++waits_;
  const std::int64_t until = due(event);
  if (until == SimStreams::kNever) return streams_.run_up_to(event);
  waited_us_ += until - streams_.now();
  (void)streams_.move_clock(until);
  streams_.catch_up();
}

Status SimDriver::wait(EventId event) {
  constexpr auto kCall = DriverCall::kWait;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  if (auto why = unusable(event)) return refuse({kCall, serial_, {}}, *why);
  charge(kCall);
  wait_until(SimStreams::Event(*streams_.find(event)));
  return ok_status();
}

Result<std::size_t> SimDriver::wait_any(const std::vector<EventId>& events) {
  constexpr auto kCall = DriverCall::kWait;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  if (auto error = refuse_if_captures_forbid(kCall)) return *error;
  if (events.empty())
    return refuse({kCall, serial_, {}}, {Errc::kInvalidArgument, "no event", true});
  for (const EventId event : events) {
    if (auto why = unusable(event)) return refuse({kCall, serial_, {}}, *why);
  }
  charge(kCall);
  std::size_t first = 0;
  for (std::size_t i = 1; i < events.size(); ++i) {
    if (due(*streams_.find(events[i])) < due(*streams_.find(events[first]))) first = i;
  }
  wait_until(SimStreams::Event(*streams_.find(events[first])));
  return first;
}

void SimDriver::recycle(EventId event) {
  if (is_shut_down_.load(std::memory_order_relaxed)) {
    calls_after_shutdown_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  MutexLock lock(mu_);
  ++serial_;
  if (auto why = unknown(event)) {
    note("recycle #" + std::to_string(serial_) + ": " + why->reason);
    return;
  }
  streams_.recycle(event, serial_);
}

CaptureMode SimDriver::exchange_capture_mode(CaptureMode mode) {
  if (is_shut_down_.load(std::memory_order_relaxed)) {
    calls_after_shutdown_.fetch_add(1, std::memory_order_relaxed);
  }
  // Also after the shutdown: the mode is the thread's, and a scope that began before must end.
  return captures_.exchange_mode(mode);
}

Result<DeviceMemory> SimDriver::memory() {
  constexpr auto kCall = DriverCall::kMemory;
  if (!announce(kCall)) return shutting_down(kCall);
  MutexLock lock(mu_);
  if (auto error = begin(kCall)) return *error;
  charge(kCall);
  return DeviceMemory{memory_.free(), options_.capacity};
}

void SimDriver::advance_to(std::int64_t us) {
  // Once an event of a replay: no lock unless something is due.
  if (!streams_.move_clock(us)) return;
  MutexLock lock(mu_);
  streams_.catch_up();
}

std::int64_t SimDriver::waited_us() const {
  MutexLock lock(mu_);
  return waited_us_;
}

std::uint64_t SimDriver::waits() const {
  MutexLock lock(mu_);
  return waits_;
}

void SimDriver::set_lag_us(std::int64_t us) {
  MutexLock lock(mu_);
  streams_.set_lag(us);
}

void SimDriver::set_lag_us(StreamRef stream, std::int64_t us) {
  MutexLock lock(mu_);
  if (auto why = unusable(stream)) return note("set_lag_us: " + why->reason);
  streams_.set_lag(stream, us);
}

void SimDriver::set_manual(bool on) {
  MutexLock lock(mu_);
  streams_.set_manual(on);
  streams_.catch_up();
}

void SimDriver::set_manual(StreamRef stream, bool on) {
  MutexLock lock(mu_);
  if (auto why = unusable(stream)) return note("set_manual: " + why->reason);
  streams_.set_manual(stream, on);
  streams_.catch_up();
}

void SimDriver::complete(StreamRef stream, std::uint64_t items) {
  MutexLock lock(mu_);
  // A destroyed stream still finishes what is queued on it.
  if (!streams_.is_alive(stream) && streams_.destroyed_by(stream) == 0) {
    return note("complete: " + unusable(stream)->reason);
  }
  streams_.catch_up();
  streams_.complete(stream.id, items);
}

void SimDriver::complete_all() {
  MutexLock lock(mu_);
  streams_.complete_all();
}

std::uint64_t SimDriver::queued(StreamRef stream) const {
  MutexLock lock(mu_);
  const bool is_known = streams_.is_alive(stream) || streams_.destroyed_by(stream) != 0;
  return is_known ? streams_.queued(stream.id) : 0;
}

StreamRef SimDriver::new_stream() { return new_stream_of(-1); }

StreamRef SimDriver::new_stream_of(int device) {
  MutexLock lock(mu_);
  return streams_.create(device);
}

void SimDriver::destroy_stream(StreamRef stream) {
  MutexLock lock(mu_);
  ++serial_;
  if (auto why = unusable(stream)) {
    return note("destroy_stream #" + std::to_string(serial_) + ": " + why->reason);
  }
  streams_.destroy(stream, serial_);
}

std::uint64_t SimDriver::launch(StreamRef stream, std::vector<Access> accesses) {
  MutexLock lock(mu_);
  const std::uint64_t serial = ++serial_;
  streams_.catch_up();
  if (auto why = unusable(stream)) {
    note((accesses.empty() ? "launch #" + std::to_string(serial)
                           : describe(serial, stream.id, accesses.front())) +
         ": " + why->reason);
    return serial;
  }
  if (SimCaptures::Capture* capture = captures_.find(stream.id)) {
    if (options_.check_hazards) {
      for (const Access& access : accesses) {
        if (auto wrong = memory_.note_use(access.range, {stream.id, 0})) {
          note(describe(serial, stream.id, access) + " in a capture: " + *wrong);
        }
      }
    }
    capture->graph.launches.push_back(std::move(accesses));
    return serial;
  }
  queue_work(stream, std::move(accesses), serial, {});
  streams_.catch_up();
  return serial;
}

void SimDriver::queue_work(StreamRef stream, std::vector<Access> accesses, std::uint64_t serial,
                           GraphId graph) {
  SimStreams::Item item;
  item.serial = serial;
  item.graph = graph;
  if (!options_.check_hazards) {
    (void)streams_.push(stream, std::move(item));
    return;
  }
  const std::uint64_t seq = streams_.next_seq(stream.id);
  // What is wrong already is said once, here, and not again when it runs.
  std::erase_if(accesses, [&](const Access& access) GPUMEMX_NO_TSA {
    const auto wrong = memory_.note_use(access.range, {stream.id, seq});
    if (wrong) note(describe_work(stream.id, item, access) + ": " + *wrong);
    return wrong.has_value();
  });
  item.accesses = std::move(accesses);
  (void)streams_.push(stream, std::move(item));
}

void SimDriver::run(StreamId stream, const SimStreams::Item& item) {
  for (const bool write : {false, true}) {
    for (const Access& access : item.accesses) {
      if (access.write != write) continue;
      if (const auto wrong = memory_.run(item.serial, stream, access)) {
        note(describe_work(stream, item, access) + ": " + *wrong);
      }
    }
  }
}

std::string SimDriver::describe_work(StreamId stream, const SimStreams::Item& item,
                                     const Access& access) const {
  std::string text = describe(item.serial, stream, access);
  if (item.graph != GraphId{}) text += " (" + graph_text(item.graph) + ")";
  if (const SimCaptures::Graph* graph = captures_.find(item.graph)) {
    text += " captured by begin_capture #" + std::to_string(graph->captured_by);
  }
  return text;
}

void SimDriver::stream_wait(StreamRef stream, EventId event) {
  MutexLock lock(mu_);
  ++serial_;
  auto why = unusable(stream);
  if (!why) why = unknown(event);
  if (why) return note("stream_wait #" + std::to_string(serial_) + ": " + why->reason);
  const SimStreams::Event& awaited = *streams_.find(event);
  if (streams_.done(awaited)) return;
  SimStreams::Item item;
  item.kind = SimStreams::Item::Kind::kWait;
  item.serial = serial_;
  item.due = awaited.due;
  item.awaited_stream = awaited.stream;
  item.awaited_seq = awaited.seq;
  (void)streams_.push(stream, std::move(item));
}

void SimDriver::begin_capture(StreamRef stream, CaptureMode mode) {
  MutexLock lock(mu_);
  ++serial_;
  const std::string text = "begin_capture #" + std::to_string(serial_) + ": ";
  if (auto why = unusable(stream)) return note(text + why->reason);
  if (const SimCaptures::Capture* other = captures_.find(stream.id)) {
    return note(text + describe(stream.id) + " captures since begin_capture #" +
                std::to_string(other->serial));
  }
  captures_.begin(stream, mode, serial_);
}

Result<GraphId> SimDriver::end_capture(StreamRef stream) {
  MutexLock lock(mu_);
  const std::string text = "end_capture #" + std::to_string(++serial_) + ": ";
  if (captures_.find(stream.id) == nullptr) {
    note(text + describe(stream.id) + " does not capture");
    return Error{Errc::kInvalidArgument, {}, text + "the stream does not capture"};
  }
  const GraphId graph = captures_.end(stream.id);
  if (graph == GraphId{}) {
    return Error{Errc::kInvalidArgument, {}, text + "the capture is invalid"};
  }
  return graph;
}

void SimDriver::replay_graph(GraphId graph, StreamRef stream) {
  MutexLock lock(mu_);
  ++serial_;
  streams_.catch_up();
  const std::string text = "replay #" + std::to_string(serial_) + " of " + graph_text(graph) + ": ";
  if (auto why = unusable(stream)) return note(text + why->reason);
  const SimCaptures::Graph* found = captures_.find(graph);
  if (found == nullptr) return note(text + "no such graph");
  for (const SimCaptures::Launch& launch : found->launches) {
    queue_work(stream, launch, ++serial_, graph);
  }
  streams_.catch_up();
}

void SimDriver::destroy_graph(GraphId graph) {
  MutexLock lock(mu_);
  ++serial_;
  if (captures_.find(graph) == nullptr) {
    return note("destroy_graph #" + std::to_string(serial_) + ": no such graph");
  }
  captures_.destroy(graph);
}

void SimDriver::lose_next_event() {
  MutexLock lock(mu_);
  lose_next_event_ = true;
}

void SimDriver::fail_nth(DriverCall call, std::uint64_t n) {
  MutexLock lock(mu_);
  faults_.fail_nth(call, n);
}

void SimDriver::fail_nth_any(std::uint64_t n) {
  MutexLock lock(mu_);
  faults_.fail_nth_any(n);
}

void SimDriver::fail_always(DriverCall call) {
  MutexLock lock(mu_);
  faults_.fail_always(call);
}

void SimDriver::clear_failures() {
  MutexLock lock(mu_);
  faults_.clear();
}

std::uint64_t SimDriver::faults_fired() const {
  MutexLock lock(mu_);
  return faults_.fired() + lost_events_asked_;
}

void SimDriver::set_call_hook(std::function<void(DriverCall)> hook) {
  MutexLock lock(hook_mu_);
  hook_ = hook ? std::make_shared<const std::function<void(DriverCall)>>(std::move(hook)) : nullptr;
  has_hook_.store(hook_ != nullptr, std::memory_order_release);
}

void SimDriver::occupy(Bytes size) {
  MutexLock lock(mu_);
  memory_.occupy(size);
}

std::vector<std::string> SimDriver::hazards() const {
  MutexLock lock(mu_);
  return hazards_.texts();
}

std::uint64_t SimDriver::hazard_count() const {
  MutexLock lock(mu_);
  return hazards_.count();
}

void SimDriver::clear_hazards() {
  MutexLock lock(mu_);
  hazards_.clear();
}

Bytes SimDriver::reserved_bytes() const {
  MutexLock lock(mu_);
  return memory_.created();
}

std::uint64_t SimDriver::mapping_count() const {
  MutexLock lock(mu_);
  return memory_.mapping_count();
}

bool SimDriver::peer_may_use(AddrRange range, int peer) const {
  MutexLock lock(mu_);
  Bytes covered;
  memory_.for_each_in(range, [&](const SimMemory::Mapping& mapping) {
    const auto& peers = mapping.peers;
    const bool may = std::find(peers.begin(), peers.end(), peer) != peers.end();
    if (may && mapping.is_usable) covered += mapping.size;
  });
  return covered >= range.size;
}

std::uint64_t SimDriver::handle_count() const {
  MutexLock lock(mu_);
  return memory_.handle_count();
}

std::uint64_t SimDriver::live_events() const {
  MutexLock lock(mu_);
  return streams_.live_events();
}

bool SimDriver::empty() const {
  MutexLock lock(mu_);
  return memory_.is_empty() && streams_.live_events() == 0;
}

DriverFigures SimDriver::meter() const {
  MutexLock lock(mu_);
  DriverFigures figures = meter_.figures();
  for (std::size_t i = 0; i < figures.calls.size(); ++i) {
    figures.calls[i] -= meter_start_.calls[i];
    figures.failures[i] -= meter_start_.failures[i];
  }
  figures.bytes_created -= meter_start_.bytes_created;
  figures.seconds -= meter_start_.seconds;
  figures.seconds_inline -= meter_start_.seconds_inline;
  figures.seconds_growth -= meter_start_.seconds_growth;
  return figures;
}

// The meter itself goes on: which handles are fresh must not be forgotten.
void SimDriver::reset_meter() {
  MutexLock lock(mu_);
  meter_start_ = meter_.figures();
}

}  // namespace gpumemx
