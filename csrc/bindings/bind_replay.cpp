// SPDX-License-Identifier: BSD-3-Clause
//
// Replay and what belongs to it. Arrays are taken as they are, never converted: a trace of another
// type is a mistake that the caller should hear about.
#include "bindings/bind_replay.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/docstrings.hpp"
#include "replay/replay.hpp"
#include "runtime/setting_set.hpp"
#include "runtime/setting_table.hpp"

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

using SettingPairs = std::map<std::string, std::string>;

void apply_settings(const SettingPairs& settings, ReplayOptions& options) {
  if (options.policy == "gpumemx") {
    SettingSet own;
    std::vector<ConfPair> pairs;
    for (const auto& [key, value] : settings) pairs.push_back({key, value});
    if (const auto mistake = own.set_all(pairs, "settings")) throw py::value_error(*mistake);
    options.core = own.core();
    return;
  }
  for (const auto& [key, value] : settings) {
    const auto mistake = options.torch.set(plain_word(key), plain_word(value));
    if (mistake) throw py::value_error("settings: " + *mistake);
  }
}

std::vector<std::string> setting_names(const std::string& policy) {
  std::vector<std::string> names;
  if (policy == "gpumemx") {
    for (const SettingSet::Key& key : SettingSet::known_keys()) names.push_back(key.name);
  } else {
    for (const std::string_view key : TorchOptions::keys()) names.emplace_back(key);
  }
  return names;
}

Bytes limit(std::optional<std::int64_t> size, const char* what) {
  if (size && *size <= 0) throw py::value_error(std::string(what) + " must be above 0 bytes");
  return {static_cast<std::uint64_t>(size.value_or(0))};
}

ReplayOptions replay_options(std::optional<std::int64_t> capacity, double lag_ms,
                             std::string policy, const SettingPairs& settings,
                             std::optional<std::int64_t> device_bytes,
                             std::optional<std::int64_t> device_total_bytes) {
  ReplayOptions options;
  options.policy = std::move(policy);
  options.limits.cap = limit(capacity, "the capacity");
  options.limits.device = limit(device_bytes, "the device's memory");
  options.limits.device_total = limit(device_total_bytes, "the device's total memory");
  options.lag_ms = lag_ms;
  apply_settings(settings, options);
  if (const auto mistake = options.validate()) throw py::value_error(*mistake);
  return options;
}

// A replay with what Python needs around it: the arrays kept alive, and one thread at a time.
class PyReplay {
 public:
  PyReplay(py::array op, py::array size, py::array stream, py::array time_us, std::int64_t slots,
           std::optional<std::int64_t> capacity, double lag_ms, const std::string& policy,
           const SettingPairs& settings, std::optional<std::int64_t> device_bytes,
           std::optional<std::int64_t> device_total_bytes, bool record_segments)
      : arrays_{std::move(op), std::move(size), std::move(stream), std::move(time_us)} {
    const TraceView trace = view(arrays_[0], arrays_[1], arrays_[2], arrays_[3], slots);
    const ReplayOptions options =
        replay_options(capacity, lag_ms, policy, settings, device_bytes, device_total_bytes);
    const py::gil_scoped_release released;
    if (const auto mistake = validate_trace(trace)) throw py::value_error(*mistake);
    replay_ = std::make_unique<Replay>(trace, options);
    if (!record_segments) return;
    const bool told = replay_->observe_segments([this](std::uint64_t at, const SegmentEvent& e) {
      const auto bytes = static_cast<std::int64_t>(e.range.size.n);
      segments_.insert(segments_.end(),
                       {static_cast<std::int64_t>(at), e.taken ? bytes : -bytes,
                        static_cast<std::int64_t>(e.range.begin.n), std::int64_t{e.stream}});
    });
    if (!told) throw py::value_error("the policy " + policy + " has no segments to record");
  }

  // Calls use(replay) without the GIL and alone.
  template <class Use>
  auto with(Use use) {
    const py::gil_scoped_release released;
    const std::scoped_lock alone(mu_);
    return use(*replay_);
  }

  // Rows of event, size (negative when given back), address and stream.
  py::array_t<std::int64_t> segments() {
    const std::vector<std::int64_t> rows = with([&](Replay&) { return segments_; });
    const auto n = static_cast<py::ssize_t>(rows.size() / 4);
    py::array_t<std::int64_t> array({n, py::ssize_t{4}});
    std::copy(rows.begin(), rows.end(), array.mutable_data());
    return array;
  }

 private:
  py::array arrays_[4];
  std::mutex mu_;
  std::vector<std::int64_t> segments_;
  std::unique_ptr<Replay> replay_;
};

// The five calls of virtual memory, and those that torch's plain segments are made with.
py::dict call_counts(const DriverFigures& driver) {
  const bool plain = driver.count(DriverCall::kAllocate) > 0 && driver.bytes_created == Bytes{};
  const std::vector<DriverCall> calls =
      plain ? std::vector{DriverCall::kAllocate, DriverCall::kFree}
            : std::vector{DriverCall::kCreate, DriverCall::kMap, DriverCall::kSetAccess,
                          DriverCall::kUnmap, DriverCall::kRelease};
  py::dict counts;
  for (const DriverCall call : calls) counts[to_string(call)] = driver.count(call);
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
  dict["retries"] = report.retries;
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

  module.def("policies", &policy_names, kPoliciesDoc);
  module.def("policy_settings", &setting_names, arg("policy"), kPolicySettingsDoc);

  py::class_<PyReplay>(module, "Replay", kReplayDoc)
      .def(py::init<py::array, py::array, py::array, py::array, std::int64_t,
                    std::optional<std::int64_t>, double, const std::string&, const SettingPairs&,
                    std::optional<std::int64_t>, std::optional<std::int64_t>, bool>(),
           arg("op").noconvert(), arg("size").noconvert(), arg("stream").noconvert(),
           arg("time_us").noconvert(), arg("slots"), py::kw_only(), arg("capacity") = py::none(),
           arg("lag_ms") = 20.0, arg("policy") = "gpumemx", arg("settings") = SettingPairs{},
           arg("device_bytes") = py::none(), arg("device_total_bytes") = py::none(),
           arg("record_segments") = false)
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
          "live_bytes",
          [](PyReplay& self) { return self.with([](Replay& r) { return r.live().n; }); },
          "Sum of the sizes asked for and not yet freed.")
      .def_property_readonly(
          "reserved_bytes",
          [](PyReplay& self) { return self.with([](Replay& r) { return r.reserved().n; }); },
          "Device memory held now.")
      .def_property_readonly("segments", &PyReplay::segments, kSegmentsDoc);
}

}  // namespace gpumemx::bindings
