// SPDX-License-Identifier: BSD-3-Clause
//
// Snapshots: what they tell, and their histories as traces.
#include "bindings/bind_snapshot.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/docstrings.hpp"
#include "replay/analysis.hpp"
#include "replay/recorded_run.hpp"

namespace py = pybind11;

namespace gpumemx::bindings {

namespace {

// Texts of a file can be anything: what is no UTF-8 is shown as such.
py::str text(std::string_view s) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(s.data(), static_cast<py::ssize_t>(s.size()), "backslashreplace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) throw py::value_error(result.error().where);
  return std::move(result).take();
}

// REQUIRES: the GIL is released.
Snapshot read(const std::string& path, const std::optional<py::function>& callback) {
  const ReadProgress progress = [&](std::uint64_t done, std::uint64_t total) {
    const py::gil_scoped_acquire held;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (callback) (*callback)(done, total);
  };
  return value_of(read_snapshot(path, progress));
}

const char* to_string(Recording state) {
  switch (state) {
    case Recording::kOn: return "on";
    case Recording::kOff: return "off";
    case Recording::kStateOnly: return "state only";
  }
  return "off";
}

py::list groups(const std::vector<AliveGroup>& groups, const char* by) {
  py::list list;
  for (const AliveGroup& group : groups) {
    py::dict d;
    d[by] = text(group.name);
    d["bytes"] = group.bytes;
    d["count"] = group.count;
    list.append(std::move(d));
  }
  return list;
}

py::dict fragmentation(const DeviceAnalysis& device) {
  py::list lonely;
  for (const Lonely& one : device.lonely) {
    py::dict d;
    d["address"] = one.segment.begin.n;
    d["size"] = one.segment.size.n;
    d["held_by"] = text(one.held_by);
    d["bytes"] = one.bytes;
    lonely.append(std::move(d));
  }
  py::dict d;
  d["reserved"] = device.at_peak.reserved;
  d["live"] = device.at_peak.live;
  d["largest_free"] = device.at_peak.largest_free;
  d["free_in_busy_segments"] = device.at_peak.free_in_busy_segments;
  d["lonely_segments"] = std::move(lonely);
  return d;
}

py::list ooms(const DeviceAnalysis& device) {
  py::list list;
  for (const OomEvent& oom : device.ooms) {
    py::dict d;
    d["event"] = oom.event;
    d["requested"] = oom.requested;
    d["device_free"] = oom.device_free;
    d["live"] = oom.live;
    d["reserved"] = oom.reserved;
    d["meaning"] = oom.meaning;
    list.append(std::move(d));
  }
  return list;
}

py::dict series(const DeviceAnalysis& device) {
  py::list time, live, reserved;
  for (const SeriesPoint& point : device.series) {
    time.append(point.time_us);
    live.append(point.live);
    reserved.append(py::cast(point.reserved));
  }
  py::dict d;
  d["time_us"] = std::move(time);
  d["live"] = std::move(live);
  d["reserved"] = std::move(reserved);
  return d;
}

py::dict device_dict(const DeviceAnalysis& device) {
  py::dict recording;
  recording["state"] = to_string(device.state);
  recording["overflowed"] = device.overflowed;
  recording["baseline_bytes"] = device.baseline_bytes;
  recording["unknown_frees"] = device.unknown_frees;
  py::dict peak;
  peak["event"] = device.peak_event;
  peak["time_us"] = device.peak_time_us;
  peak["live"] = device.peak_live;
  peak["reserved"] = device.peak_reserved;
  py::dict alive;
  alive["by_site"] = groups(device.by_site, "site");
  alive["by_size_class"] = groups(device.by_size_class, "class");
  alive["by_category"] = groups(device.by_category, "category");
  py::dict d;
  d["device"] = device.device;
  d["events"] = device.events;
  d["recording"] = std::move(recording);
  d["live_now"] = device.live_now;
  d["reserved_now"] = device.reserved_now;
  d["peak"] = std::move(peak);
  d["alive_at_peak"] = std::move(alive);
  d["fragmentation"] = fragmentation(device);
  d["ooms"] = ooms(device);
  d["series"] = series(device);
  return d;
}

py::dict analyze_snapshot(const std::string& path, const std::optional<py::function>& progress) {
  const Analysis analysis = [&] {
    const py::gil_scoped_release released;
    return value_of(analyze(read(path, progress)));
  }();
  py::list devices;
  for (const DeviceAnalysis& device : analysis.devices) devices.append(device_dict(device));
  py::dict d;
  d["file"] = text(path);
  d["schema"] = analysis.schema;
  d["devices"] = std::move(devices);
  return d;
}

template <class T>
py::array_t<T> array(const std::vector<T>& items) {
  return py::array_t<T>(static_cast<py::ssize_t>(items.size()), items.data());
}

py::list traces(const std::string& path) {
  const std::vector<SnapshotTrace> traces = [&] {
    const py::gil_scoped_release released;
    return value_of(snapshot_traces(read(path, std::nullopt)));
  }();
  py::list list;
  for (const SnapshotTrace& trace : traces) {
    py::dict d;
    d["device"] = trace.device;
    d["op"] = array(trace.op);
    d["size"] = array(trace.size);
    d["stream"] = array(trace.stream);
    d["time_us"] = array(trace.time_us);
    d["slots"] = trace.slots;
    list.append(std::move(d));
  }
  return list;
}

}  // namespace

void bind_snapshot(py::module_& module) {
  module.def("analyze_snapshot", &analyze_snapshot, py::arg("path"),
             py::arg("progress_callback") = py::none(), kAnalyzeSnapshotDoc);
  module.def("snapshot_traces", &traces, py::arg("path"), kSnapshotTracesDoc);
}

}  // namespace gpumemx::bindings
