// SPDX-License-Identifier: BSD-3-Clause
//
// Replay and what belongs to it. Arrays are taken as they are, never converted: a trace of another
// type is a mistake that the caller should hear about.
#include "bindings/bind_replay.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/docstrings.hpp"
#include "replay/replay.hpp"

namespace py = pybind11;

namespace gpumemx::bindings {

namespace {

template <class T>
std::span<const T> items(const py::array& array, const char* name) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
  if (!py::array_t<T, py::array::c_style>::check_(array) || array.ndim() != 1 || !aligned) {
    throw py::type_error(std::string(name) + " must be a one-dimensional C-contiguous array of " +
                         std::string(py::str(py::dtype::of<T>())) + ", not " +
                         std::to_string(array.ndim()) + "-dimensional of " +
                         std::string(py::str(array.dtype())));
  }
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

TraceView view(const py::array& op, const py::array& size, const py::array& stream,
               const py::array& time_us, std::int64_t slots) {
  return {items<std::int64_t>(op, "op"), items<std::int64_t>(size, "size"),
          items<std::int16_t>(stream, "stream"), items<std::int64_t>(time_us, "time_us"), slots};
}

ReplayOptions replay_options(std::optional<std::int64_t> capacity, double lag_ms) {
  if (capacity && *capacity <= 0) throw py::value_error("the capacity must be above 0 bytes");
  ReplayOptions options;
  options.capacity = {static_cast<std::uint64_t>(capacity.value_or(0))};
  options.lag_ms = lag_ms;
  if (const auto mistake = options.validate()) throw py::value_error(*mistake);
  return options;
}

// A replay with what Python needs around it: the arrays kept alive, and one thread at a time.
class PyReplay {
 public:
  PyReplay(py::array op, py::array size, py::array stream, py::array time_us, std::int64_t slots,
           std::optional<std::int64_t> capacity, double lag_ms)
      : arrays_{std::move(op), std::move(size), std::move(stream), std::move(time_us)} {
    const TraceView trace = view(arrays_[0], arrays_[1], arrays_[2], arrays_[3], slots);
    const ReplayOptions options = replay_options(capacity, lag_ms);
    const py::gil_scoped_release released;
    if (const auto mistake = validate_trace(trace)) throw py::value_error(*mistake);
    replay_ = std::make_unique<Replay>(trace, options);
  }

  // Calls use(replay) without the GIL and alone.
  template <class Use>
  auto with(Use use) {
    const py::gil_scoped_release released;
    const std::scoped_lock alone(mu_);
    return use(*replay_);
  }

 private:
  py::array arrays_[4];
  std::mutex mu_;
  std::unique_ptr<Replay> replay_;
};

py::dict call_counts(const DriverFigures& driver) {
  py::dict counts;
  for (const DriverCall call : {DriverCall::kCreate, DriverCall::kMap, DriverCall::kSetAccess,
                                DriverCall::kUnmap, DriverCall::kRelease}) {
    counts[to_string(call)] = driver.count(call);
  }
  return counts;
}

py::dict path_counts(const PathCounts& paths) {
  py::dict counts;
  counts["hits"] = paths.hits;
  counts["misses"] = paths.misses;
  counts["holes"] = paths.holes;
  counts["created"] = paths.created;
  counts["harvested_own"] = paths.harvested_own;
  counts["harvested_loose"] = paths.harvested_loose;
  counts["harvested_other"] = paths.harvested_other;
  counts["alias_switches"] = paths.alias_switches;
  counts["repointed"] = paths.repointed;
  counts["recut"] = paths.recut;
  counts["waits"] = paths.waits;
  counts["rollbacks"] = paths.rollbacks;
  counts["aliases_dropped"] = paths.aliases_dropped;
  counts["fences"] = paths.fences;
  return counts;
}

py::dict report_dict(const ReplayReport& report) {
  py::dict dict;
  dict["events"] = report.events;
  dict["live_peak_bytes"] = report.live_peak.n;
  dict["reserved_peak_bytes"] = report.reserved_peak.n;
  dict["driver_calls"] = call_counts(report.driver);
  dict["driver_seconds"] = report.driver.seconds;
  dict["driver_seconds_inline"] = report.driver.seconds_inline;
  dict["driver_seconds_growth"] = report.driver.seconds_growth;
  dict["trace_seconds"] = report.trace_seconds;
  dict["wait_seconds"] = report.wait_seconds;
  dict["host_ns_per_event"] = report.host_ns_per_event;
  dict["failed_at"] = report.failed_at;
  dict["paths"] = path_counts(report.paths);
  return dict;
}

}  // namespace

void bind_replay(py::module_& module) {
  using py::arg;

  module.def(
      "validate_trace",
      [](const py::array& op, const py::array& size, const py::array& stream,
         const py::array& time_us, std::int64_t slots) {
        const TraceView trace = view(op, size, stream, time_us, slots);
        const py::gil_scoped_release released;
        return validate_trace(trace);
      },
      arg("op").noconvert(), arg("size").noconvert(), arg("stream").noconvert(),
      arg("time_us").noconvert(), arg("slots"), kValidateTraceDoc);

  py::class_<PyReplay>(module, "Replay", kReplayDoc)
      .def(py::init<py::array, py::array, py::array, py::array, std::int64_t,
                    std::optional<std::int64_t>, double>(),
           arg("op").noconvert(), arg("size").noconvert(), arg("stream").noconvert(),
           arg("time_us").noconvert(), arg("slots"), py::kw_only(), arg("capacity") = py::none(),
           arg("lag_ms") = 20.0)
      .def(
          "run",
          [](PyReplay& self, std::optional<std::uint64_t> max_events) {
            return self.with([&](Replay& r) { return r.run(max_events.value_or(UINT64_MAX)); });
          },
          arg("max_events") = py::none(), kRunDoc)
      .def(
          "report",
          [](PyReplay& self) {
            return report_dict(self.with([](Replay& r) { return r.report(); }));
          },
          kReportDoc)
      .def_property_readonly(
          "finished",
          [](PyReplay& self) { return self.with([](Replay& r) { return r.finished(); }); },
          "Whether every event is done or one ran out of memory.")
      .def_property_readonly(
          "failed_at",
          [](PyReplay& self) { return self.with([](Replay& r) { return r.failed_at(); }); },
          "Index of the event that ran out of memory, or None.")
      .def_property_readonly(
          "events_done",
          [](PyReplay& self) { return self.with([](Replay& r) { return r.events_done(); }); },
          "Events done so far.")
      .def_property_readonly(
          "events_total",
          [](PyReplay& self) { return self.with([](Replay& r) { return r.events_total(); }); },
          "Events of the whole trace.")
      .def_property_readonly(
          "reserved_bytes",
          [](PyReplay& self) { return self.with([](Replay& r) { return r.reserved().n; }); },
          "Device memory held now.");
}

}  // namespace gpumemx::bindings
