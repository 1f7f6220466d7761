// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/torch/out_of_memory.hpp"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "adapter/install.hpp"
#include "adapter/torch_allocator.hpp"

namespace py = pybind11;

namespace gpumemx::bindings {

py::dict to_dict(const MemoryFigures& f) {
  py::dict d;
  d["device_known"] = f.device_known;
  d["device_total"] = f.device_total.n;
  d["device_free"] = f.device_free.n;
  d["others"] = f.others.n;
  d["cap"] = f.cap.n == ~0ull ? py::object(py::none()) : py::object(py::int_(f.cap.n));
  d["reserved"] = f.reserved.n;
  d["live"] = f.live.n;
  d["pending"] = f.pending.n;
  d["held"] = f.held.n;
  d["idle_pending"] = f.idle_pending.n;
  d["idle_private"] = f.idle_private.n;
  d["idle"] = f.idle.n;
  d["largest_free"] = f.largest_free.n;
  return d;
}

namespace {

py::dict report_dict(const OomReport& r) {
  py::dict d = to_dict(static_cast<const MemoryFigures&>(r.verdict));
  py::list holders;
  for (const OomHolder& h : r.holders) holders.append(py::make_tuple(h.site, h.bytes.n, h.blocks));
  d["id"] = r.id;
  d["device"] = r.device;
  d["cause"] = to_string(r.verdict.cause);
  d["rejected"] = r.verdict.rejected;
  d["requested"] = r.verdict.requested.n;
  d["block"] = r.verdict.block.n;
  d["stream"] = r.verdict.stream.native;
  d["in_private_pools"] = r.verdict.in_private_pools.n;
  d["cap_source"] = r.cap_source;
  d["driver_said"] = r.verdict.driver_said;
  d["holders"] = holders;
  d["advice"] = r.advice();
  d["text"] = r.text();
  return d;
}

py::object report_or_none(const std::shared_ptr<const OomReport>& report) {
  return report == nullptr ? py::object(py::none()) : py::object(report_dict(*report));
}

// A callback of Python's for ever, from threads that have Python's lock or not. Leaked: it outlives
// the interpreter, where nobody may let go of it.
template <class Call>
bool call_python(const py::object& callback, Call call) {
  if (Py_IsInitialized() == 0) return false;
  const py::gil_scoped_acquire gil;
  try {
    return call(callback);
  } catch (py::error_already_set& error) {  // it stands in nobody's way, least of all the OOM's
    error.discard_as_unraisable("a callback of gpumemx");
    return false;
  }
}

}  // namespace

void bind_out_of_memory(py::module_& m) {
  m.def(
      "oom_report",
      [](const std::string& id) {
        auto* allocator = adapter::installed();
        return report_or_none(allocator == nullptr ? nullptr : allocator->oom_reports().find(id));
      },
      py::arg("id"), "The report with this number, or None. Bytes.");
  m.def(
      "last_oom",
      [] {
        auto* allocator = adapter::installed();
        return report_or_none(allocator == nullptr ? nullptr : allocator->oom_reports().latest());
      },
      "The report of the last request that failed, or None.");
  m.def(
      "on_out_of_memory",
      [](py::object callback) {
        auto* call = new py::object(std::move(callback));
        adapter::installed()->oom_reports().listen([call](const OomReport& report) {
          call_python(*call, [&](const py::object& f) {
            f(report_dict(report));
            return true;
          });
        });
      },
      py::arg("callback"),
      "Call it for ever with the report of each request that fails, before the error is raised. "
      "REQUIRES: is_installed().");
  m.def(
      "on_memory_pressure",
      [](py::object callback) {
        auto* call = new py::object(std::move(callback));
        DeviceRegistry::instance().pressure().add_for_ever(
            [call](int device, const PressureInfo& info) {
              return call_python(*call, [&](const py::object& f) {
                return f(device, info.requested.n, info.stream.native, info.attempt,
                         info.device_free.n, info.cached.n)
                    .cast<bool>();
              });
            });
      },
      py::arg("callback"),
      "Call it for ever with device, size, stream, attempt, free and cached when a request cannot "
      "be served; True: it is tried again.");
}

}  // namespace gpumemx::bindings
