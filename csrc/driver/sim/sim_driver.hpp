// SPDX-License-Identifier: BSD-3-Clause
//
// A device that is not there: what-if replay runs on it, and it is the bench that every layer above
// is tested on. It keeps memory, streams and a clock, charges each call what the cost model says,
// and fails on demand. Deterministic: one program on one thread always gives the same run.
//
// With check_hazards it watches what programs do to memory. Work is launched with the ranges that
// it reads and writes; each range must be USABLE when the work is queued and again when it runs,
// and a read must find the tag that it expects. What is wrong is noted in hazards(), naming both
// operations; the program goes on. Work "runs" at its due time: see SimStreams.
//
// Noted as hazards: use of a page that is not USABLE; a read that finds other or undefined
// contents; unmap of a range that queued work touches; calls out of the order of device_driver.hpp;
// query, wait, allocate and free while a capture forbids them; anything on a destroyed stream; an
// event that is not live; a graph replayed over memory that is gone. Not hazards: full device, full
// mapping table, record() on a capturing stream, failures on demand, calls after shut_down().
//
// Threads: every method may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "driver/device_driver.hpp"
#include "driver/meter.hpp"
#include "driver/sim/faults.hpp"
#include "driver/sim/hazards.hpp"
#include "driver/sim/sim_captures.hpp"
#include "driver/sim/sim_memory.hpp"
#include "driver/sim/sim_options.hpp"
#include "driver/sim/sim_streams.hpp"

namespace gpumemx {

class SimDriver final : public DeviceDriver {
 public:
  explicit SimDriver(const SimOptions& options = {});
  ~SimDriver() override;

  // DeviceDriver. A set_access() over n mappings is charged as n calls, as it costs; it is one call
  // to the failure counters. A call that fails costs no modelled time.
  const DeviceTraits& traits() const noexcept override { return traits_; }
  Result<AddrRange> reserve(Bytes size, Bytes alignment) override GPUMEMX_EXCLUDES(mu_);
  Status unreserve(AddrRange range) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> create(Bytes size) override GPUMEMX_EXCLUDES(mu_);
  Status release(HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  Status map(AddrRange range, HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  using DeviceDriver::set_access;
  Status set_access(AddrRange range, const std::vector<int>& peers) override GPUMEMX_EXCLUDES(mu_);
  Status unmap(AddrRange range) override GPUMEMX_EXCLUDES(mu_);
  // A real descriptor, which means something to this device only and holds no memory: an import after
  // the last handle was released fails. Fabric handles are not simulated.
  Result<int> export_handle(HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> import_handle(int fd) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> import_fabric(const FabricHandle& exported) override GPUMEMX_EXCLUDES(mu_);
  Result<DeviceAddr> allocate(Bytes size) override GPUMEMX_EXCLUDES(mu_);
  Status free(DeviceAddr address) override GPUMEMX_EXCLUDES(mu_);  // all queued work runs first
  Result<StreamId> stream_id(std::uint64_t native) override GPUMEMX_EXCLUDES(mu_);
  Result<EventId> record(StreamRef stream) override GPUMEMX_EXCLUDES(mu_);
  Result<bool> query(EventId event) override GPUMEMX_EXCLUDES(mu_);
  Status wait(EventId event) override GPUMEMX_EXCLUDES(mu_);
  // The one that is due first; in manual mode an event is due last.
  Result<std::size_t> wait_any(const std::vector<EventId>& events) override GPUMEMX_EXCLUDES(mu_);
  void recycle(EventId event) override GPUMEMX_EXCLUDES(mu_);
  CaptureMode exchange_capture_mode(CaptureMode mode) override;
  Result<DeviceMemory> memory() override GPUMEMX_EXCLUDES(mu_);
  Status synchronize() override GPUMEMX_EXCLUDES(mu_);  // all queued work runs first
  // Noted as a hazard: queued work that touches either range.
  Status copy(DeviceAddr to, DeviceAddr from, Bytes size) override GPUMEMX_EXCLUDES(mu_);
  // What is queued on the streams runs at once, in no time. Who waits for held work lets it run.
  Result<HoldId> hold(const std::vector<StreamRef>& streams) override GPUMEMX_EXCLUDES(mu_);
  void let_go(HoldId hold) override GPUMEMX_EXCLUDES(mu_);

  // Time, in microseconds from the start. Only these, wait(), wait_any(), free() and synchronize() move
  // it, never back.
  std::int64_t now_us() const { return streams_.now(); }
  void advance_to(std::int64_t us) GPUMEMX_EXCLUDES(mu_);
  void advance_by(std::int64_t us) GPUMEMX_EXCLUDES(mu_) { advance_to(now_us() + us); }
  // How far the clock was moved by wait() and free(), and by how many of them.
  std::int64_t waited_us() const GPUMEMX_EXCLUDES(mu_);
  std::uint64_t waits() const GPUMEMX_EXCLUDES(mu_);

  // How long after it is queued an item completes: of the device, and of one stream. At first 0.
  void set_lag_us(std::int64_t us) GPUMEMX_EXCLUDES(mu_);
  void set_lag_us(StreamRef stream, std::int64_t us) GPUMEMX_EXCLUDES(mu_);
  // In manual mode an item completes only by complete(), wait() or free(). Events are items too.
  void set_manual(bool on) GPUMEMX_EXCLUDES(mu_);
  void set_manual(StreamRef stream, bool on) GPUMEMX_EXCLUDES(mu_);
  void complete(StreamRef stream, std::uint64_t items = UINT64_MAX) GPUMEMX_EXCLUDES(mu_);
  void complete_all() GPUMEMX_EXCLUDES(mu_);
  std::uint64_t queued(StreamRef stream) const GPUMEMX_EXCLUDES(mu_);  // items not yet complete

  // Streams. destroy_stream() lets queued work finish; the native value comes back for the next new
  // stream, the id never.
  StreamRef default_stream() const { return {StreamId{1}, 0}; }
  StreamRef new_stream() GPUMEMX_EXCLUDES(mu_);
  // One of another device, whose work uses this one's memory. It has no other clock than this device.
  StreamRef new_stream_of(int device) GPUMEMX_EXCLUDES(mu_);
  // The stream with this handle by its own name, also while it captures. Its id is 0 if there is none.
  StreamRef stream_with(std::uint64_t native) const GPUMEMX_EXCLUDES(mu_);
  void destroy_stream(StreamRef stream) GPUMEMX_EXCLUDES(mu_);

  // Queues one piece of work; on a capturing stream it becomes part of the graph instead and does
  // not run. Its reads are checked before its writes take effect. Returns its serial number, by
  // which hazards name it.
  std::uint64_t launch(StreamRef stream, std::vector<Access> accesses) GPUMEMX_EXCLUDES(mu_);
  // What is queued on `stream` from here on runs after the event, as cudaStreamWaitEvent.
  void stream_wait(StreamRef stream, EventId event) GPUMEMX_EXCLUDES(mu_);

  // Captures and graphs. end_capture() fails with kInvalidArgument when a forbidden call ended it.
  void begin_capture(StreamRef stream, CaptureMode mode) GPUMEMX_EXCLUDES(mu_);
  Result<GraphId> end_capture(StreamRef stream) GPUMEMX_EXCLUDES(mu_);
  void replay_graph(GraphId graph, StreamRef stream) GPUMEMX_EXCLUDES(mu_);
  void destroy_graph(GraphId graph) GPUMEMX_EXCLUDES(mu_);

  // As if a capture had begun and ended within the next record(): query() and wait() of that event fail
  // with kCaptureActive, and count as faults.
  void lose_next_event() GPUMEMX_EXCLUDES(mu_);

  // Failures on demand: see Faults. The call fails with kOutOfMemory (create, set_access, allocate)
  // or kDriverFailure (all others) and has no effect.
  void fail_nth(DriverCall call, std::uint64_t n) GPUMEMX_EXCLUDES(mu_);
  void fail_nth_any(std::uint64_t n) GPUMEMX_EXCLUDES(mu_);
  void fail_always(DriverCall call) GPUMEMX_EXCLUDES(mu_);
  void clear_failures() GPUMEMX_EXCLUDES(mu_);
  std::uint64_t faults_fired() const GPUMEMX_EXCLUDES(mu_);

  // From here on every call fails with kShuttingDown and touches nothing; each is counted,
  // recycle() and exchange_capture_mode() too.
  void shut_down() { is_shut_down_.store(true); }
  std::uint64_t calls_after_shutdown() const { return calls_after_shutdown_.load(); }

  // Called before each driver call takes effect, by the calling thread and outside the device's
  // lock: it may block, and may call this device.
  void set_call_hook(std::function<void(DriverCall)> hook) GPUMEMX_EXCLUDES(hook_mu_);

  // Memory that other processes hold now (not in addition to before).
  void occupy(Bytes size) GPUMEMX_EXCLUDES(mu_);

  // What a test looks at.
  std::vector<std::string> hazards() const GPUMEMX_EXCLUDES(mu_);  // the first 100
  std::uint64_t hazard_count() const GPUMEMX_EXCLUDES(mu_);
  void clear_hazards() GPUMEMX_EXCLUDES(mu_);
  Bytes reserved_bytes() const GPUMEMX_EXCLUDES(mu_);  // handles and plain allocations
  std::uint64_t mapping_count() const GPUMEMX_EXCLUDES(mu_);
  // Whether every page of the range is USABLE by another device of the machine.
  bool peer_may_use(AddrRange range, int peer) const GPUMEMX_EXCLUDES(mu_);
  std::uint64_t handle_count() const GPUMEMX_EXCLUDES(mu_);
  std::uint64_t live_events() const GPUMEMX_EXCLUDES(mu_);
  // No handle, mapping, plain allocation, reserved range or live event.
  bool empty() const GPUMEMX_EXCLUDES(mu_);
  DriverFigures meter() const GPUMEMX_EXCLUDES(mu_);  // since reset_meter()
  void reset_meter() GPUMEMX_EXCLUDES(mu_);

 private:
  // False after shut_down(), then the caller fails; else runs the hook.
  bool announce(DriverCall call);
  // Starts a call under the lock: gives it its number, runs what is due, and says how it fails
  // if it is to.
  std::optional<Error> begin(DriverCall call, Bytes size = {}) GPUMEMX_REQUIRES(mu_);
  // Ends one that was refused: counts it, and notes the hazard if it is one.
  Error refuse(const PastCall& call, const Refusal& why) GPUMEMX_REQUIRES(mu_);
  std::int64_t due(const SimStreams::Event& event) const GPUMEMX_REQUIRES(mu_);
  void wait_until(const SimStreams::Event& event) GPUMEMX_REQUIRES(mu_);
  void charge(DriverCall call, HandleId handle = {}, Bytes size = {}) GPUMEMX_REQUIRES(mu_);

  std::optional<Error> begin_virtual(DriverCall call, Bytes size = {}) GPUMEMX_REQUIRES(mu_);
  // Ends the captures that forbid the call now begun; with one, the call fails.
  std::optional<Error> refuse_if_captures_forbid(DriverCall call) GPUMEMX_REQUIRES(mu_);
  std::optional<Refusal> unusable(StreamRef stream) const GPUMEMX_REQUIRES(mu_);
  std::optional<Refusal> unknown(EventId event) const GPUMEMX_REQUIRES(mu_);
  std::optional<Refusal> unusable(EventId event) GPUMEMX_REQUIRES(mu_);
  void note(std::string hazard) GPUMEMX_REQUIRES(mu_);
  void note_queued_uses(const PastCall& call, DeviceAddr mapping) GPUMEMX_REQUIRES(mu_);
  void finish_all() GPUMEMX_REQUIRES(mu_);
  void queue_work(StreamRef stream, std::vector<Access> accesses, std::uint64_t serial,
                  GraphId graph) GPUMEMX_REQUIRES(mu_);
  // Called by streams_, whose every method but the clock's is called under mu_.
  void run(StreamId stream, const SimStreams::Item& item) GPUMEMX_NO_TSA;
  std::string describe_work(StreamId stream, const SimStreams::Item& item,
                            const Access& access) const GPUMEMX_REQUIRES(mu_);

  const SimOptions options_;
  const DeviceTraits traits_;

  mutable Mutex mu_;  // a leaf: nothing else is locked while this is held
  SimMemory memory_ GPUMEMX_GUARDED_BY(mu_);
  SimStreams streams_;    // guarded by mu_, its clock apart
  SimCaptures captures_;  // guarded by mu_, modes of threads apart
  Faults faults_ GPUMEMX_GUARDED_BY(mu_);
  HazardLog hazards_ GPUMEMX_GUARDED_BY(mu_);
  DriverMeter meter_ GPUMEMX_GUARDED_BY(mu_);
  DriverFigures meter_start_ GPUMEMX_GUARDED_BY(mu_);  // what reset_meter() saw
  std::uint64_t serial_ GPUMEMX_GUARDED_BY(mu_) = 0;   // of the newest call or launch
  std::map<HoldId, std::vector<StreamRef>> holds_ GPUMEMX_GUARDED_BY(mu_);
  std::int64_t waited_us_ GPUMEMX_GUARDED_BY(mu_) = 0;
  std::uint64_t waits_ GPUMEMX_GUARDED_BY(mu_) = 0;
  bool lose_next_event_ GPUMEMX_GUARDED_BY(mu_) = false;
  std::uint64_t lost_events_asked_ GPUMEMX_GUARDED_BY(mu_) = 0;

  std::atomic<bool> is_shut_down_{false};
  std::atomic<std::uint64_t> calls_after_shutdown_{0};

  Mutex hook_mu_;  // a leaf
  std::atomic<bool> has_hook_{false};
  std::shared_ptr<const std::function<void(DriverCall)>> hook_ GPUMEMX_GUARDED_BY(hook_mu_);
};

}  // namespace gpumemx
