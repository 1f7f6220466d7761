// SPDX-License-Identifier: BSD-3-Clause
//
// gpumemx._torch_<major>_<minor>: the module that holds the allocator when it is torch's. One is
// built for each minor release of torch; Python chooses (gpumemx/_adapter.py). Translation only.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include "adapter/blas_workspaces.hpp"
#include "adapter/device_view.hpp"
#include "adapter/install.hpp"
#include "base/version.hpp"
#include "bindings/torch/out_of_memory.hpp"
#include "bindings/torch/simulated_history.hpp"
#include "bindings/torch/simulated_pools.hpp"
#include "driver/sim/sim_driver.hpp"
#include "monitor/scope.hpp"
#include "monitor/summary.hpp"

namespace py = pybind11;

namespace gpumemx::bindings {

namespace {

using adapter::DeviceView;

py::dict to_dict(const TrimReport& r) {
  py::dict d;
  d["predicted"] = r.predicted.n;
  d["released"] = r.released.n;
  d["live"] = r.live.n;
  d["held"] = r.held.n;
  d["pending"] = r.pending.n;
  d["pools"] = r.pools.n;
  d["wanted"] = r.wanted.n;
  d["text"] = describe(r);
  return d;
}

// By the stream's handle: 0 is the default stream. A handle may have been another stream's before.
py::dict to_dict(const std::vector<StreamShare>& shares) {
  std::map<std::uint64_t, std::uint64_t> by_handle;
  for (const StreamShare& share : shares) by_handle[share.stream.native] += share.bytes.n;
  return py::cast(by_handle);
}

py::dict to_dict(const adapter::DeviceReport& r) {
  const MemoryReport& m = r.memory;
  py::dict d = bindings::to_dict(m.figures);
  d["live_requested"] = m.figures.live_requested.n;
  d["in_private_pools"] = m.figures.in_private_pools.n;
  d["workspaces"] = r.workspaces ? py::object(py::int_(r.workspaces->n)) : py::object(py::none());
  d["earlier"] = r.earlier.n;
  d["pending_on"] = to_dict(m.pending_on);
  d["waiting_on"] = to_dict(m.waiting_on);
  d["held_by_live"] = m.held_by.live.n;
  d["held_by_pending"] = m.held_by.pending.n;
  d["held_by_pools"] = m.held_by.pools.n;
  py::list pools;
  for (std::size_t i = 0; i < m.pools.size(); ++i) {
    const auto& [first, second] = r.pool_names[i];
    const PoolShare& pool = m.pools[i];
    pools.append(py::make_tuple(py::make_tuple(first, second), pool.users > 0, pool.reserved.n,
                                pool.live.n));
  }
  d["pools"] = pools;
  d["releasable"] = m.releasable.n;
  d["releasable_by_waiting"] = m.releasable_by_waiting.n;
  d["state"] = state_in_words(m.figures);
  return d;
}

py::dict to_dict(const ScopeFigures& f) {
  py::dict d;
  d["before"] = f.before.n;
  d["after"] = f.after.n;
  d["peak"] = f.peak.n;
  d["allocations"] = f.allocations;
  d["driver_calls"] = f.driver_calls;
  d["driver_seconds"] = f.driver_seconds;
  return d;
}

py::dict paths(const Stats& stats) {
  const PathCounts& p = stats.paths;
  py::dict d;
  d["hits"] = p.hits;
  d["front_hits"] = p.front_hits;
  d["misses"] = p.misses;
  d["holes"] = p.holes;
  d["created"] = p.created;
  d["harvested_own"] = p.harvested_own;
  d["harvested_loose"] = p.harvested_loose;
  d["harvested_other"] = p.harvested_other;
  d["alias_switches"] = p.alias_switches;
  d["repointed"] = p.repointed;
  d["recut"] = p.recut;
  d["late_retired"] = p.late_retired;
  d["waits"] = p.waits;
  d["rollbacks"] = p.rollbacks;
  d["plain_segments"] = p.plain_segments;
  d["aliases_dropped"] = p.aliases_dropped;
  d["fences"] = p.fences;
  d["rebacked"] = p.rebacked;
  d["disturbed"] = p.disturbed;
  d["dormant_aliases"] = stats.dormant_aliases;
  d["returning_bytes"] = stats.returning_bytes.n;
  return d;
}

py::dict to_dict(const DriverFigures& f) {
  py::dict calls, seconds;
  for (int i = 0; i < kDriverCallKinds; ++i) {
    const auto kind = static_cast<std::size_t>(i);
    if (f.calls[kind] == 0) continue;
    const char* name = to_string(static_cast<DriverCall>(i));
    calls[name] = f.calls[kind];
    seconds[name] = f.seconds_of[kind];
  }
  py::dict d;
  d["calls"] = calls;
  d["seconds_of"] = seconds;
  d["seconds"] = f.seconds;
  d["seconds_inline"] = f.seconds_inline;
  d["seconds_growth"] = f.seconds_growth;
  return d;
}

void install(const std::string& conf, const std::map<std::string, std::string>& arguments,
             bool late, int simulated_devices, std::uint64_t simulated_bytes) {
  adapter::InstallRequest request;
  request.late = late;
  if (auto wrong = request.settings.apply(conf, SettingSet::kConfSource))
    throw py::value_error(*wrong);
  std::vector<ConfPair> pairs;
  for (const auto& [key, value] : arguments) pairs.push_back({key, value});
  if (auto wrong = request.settings.set_all(pairs, SettingSet::kArgumentSource)) {
    throw py::value_error(*wrong);
  }
  if (simulated_devices > 0) {
    request.simulated_devices = simulated_devices;
    request.open = [simulated_bytes,
                    simulated_devices](int device) -> Result<std::unique_ptr<DeviceDriver>> {
      SimOptions options;
      options.devices = static_cast<std::uint32_t>(simulated_devices);
      options.capacity = {simulated_bytes};
      options.check_hazards = false;
      options.device = static_cast<std::uint32_t>(device);
      return std::unique_ptr<DeviceDriver>(std::make_unique<SimDriver>(options));
    };
  }
  if (auto wrong = adapter::install(std::move(request))) throw std::runtime_error(wrong->text);
}

py::list settings() {
  py::list out;
  for (const SettingSet::Entry& e : adapter::settings_in_force()) {
    py::dict d;
    d["key"] = e.key;
    d["value"] = e.value;
    d["source"] = e.source;
    d["note"] = e.note;
    out.append(d);
  }
  return out;
}

// torch translates its errors for its own functions. Whether it would for ours depends on the pybind11
// that either was built with, so this module does it itself, as torch does.
void translate_torch_errors(std::exception_ptr pending) {
  const auto raise = [](PyObject* type, const c10::Error& error) {
    PyErr_SetString(type, error.what_without_backtrace());
  };
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const c10::OutOfMemoryError& error) {
    raise(py::module_::import("torch").attr("OutOfMemoryError").ptr(), error);
  } catch (const c10::IndexError& error) {
    raise(PyExc_IndexError, error);
  } catch (const c10::ValueError& error) {
    raise(PyExc_ValueError, error);
  } catch (const c10::NotImplementedError& error) {
    raise(PyExc_NotImplementedError, error);
  } catch (const c10::Error& error) {
    raise(PyExc_RuntimeError, error);
  }
}

// What tests of the adapter do on a simulated device, where torch has no current stream.
void bind_simulated(py::module_& m) {
  m.def("_sim_alloc", [](int device, std::size_t nbytes, std::uint64_t stream_id) {
    const StreamInfo stream{{StreamId{stream_id}, stream_id == 1 ? 0 : stream_id}, true};
    const py::gil_scoped_release release;
    return reinterpret_cast<std::uintptr_t>(
        adapter::installed()->allocate_on(static_cast<c10::DeviceIndex>(device), nbytes, stream));
  });
  m.def("_sim_free", [](std::uintptr_t address) {
    const py::gil_scoped_release release;
    adapter::installed()->raw_delete(reinterpret_cast<void*>(address));  // NOLINT: device memory
  });
  m.def("_sim_alloc_at",
        [](int device, std::size_t nbytes, std::uint64_t stream_id, std::uintptr_t address) {
          const StreamInfo stream{{StreamId{stream_id}, stream_id == 1 ? 0 : stream_id}, true};
          const py::gil_scoped_release release;
          (void)adapter::installed()->allocate_at(
              static_cast<c10::DeviceIndex>(device), nbytes, stream,
              reinterpret_cast<void*>(address));  // NOLINT: device memory
        });
  m.def("_sim_add_peer", [](int device, int peer) {
    adapter::installed()->add_peer(static_cast<c10::DeviceIndex>(device),
                                   static_cast<c10::DeviceIndex>(peer));
  });
  m.def("_sim_cache_info", [](int device, std::size_t largest) {
    adapter::installed()->cacheInfo(static_cast<c10::DeviceIndex>(device), &largest);
    return largest;
  });
  m.def("_sim_base", [](std::uintptr_t address) {
    std::size_t size = 0;
    void* base = adapter::installed()->getBaseAllocation(reinterpret_cast<void*>(address),
                                                         &size);  // NOLINT: device memory
    return py::make_tuple(reinterpret_cast<std::uintptr_t>(base), size);
  });
  m.def("_sim_share", [](std::uintptr_t address) {
    const auto shared = adapter::installed()->shareIpcHandle(
        reinterpret_cast<void*>(address));  // NOLINT: device memory
    return py::make_tuple(shared.offset, py::bytes(shared.handle));
  });
  m.def("_sim_add_workspace", [](int device, std::size_t nbytes, std::uint64_t stream_id) {
    const StreamInfo stream{{StreamId{stream_id}, stream_id == 1 ? 0 : stream_id}, true};
    const py::gil_scoped_release release;
    auto& allocator = *adapter::installed();
    void* ptr = allocator.allocate_on(static_cast<c10::DeviceIndex>(device), nbytes, stream);
    return adapter::plant_blas_workspace(
        {ptr, ptr, allocator.raw_deleter(), {c10::kCUDA, static_cast<c10::DeviceIndex>(device)}});
  });
  struct Opened {
    std::shared_ptr<void> memory;
  };
  py::class_<Opened>(m, "_SimOpened")
      .def_property_readonly(
          "address",
          [](const Opened& o) { return reinterpret_cast<std::uintptr_t>(o.memory.get()); })
      .def("close", [](Opened& o) {
        const py::gil_scoped_release release;
        o.memory.reset();
      });
  m.def("_sim_open", [](int device, const std::string& handle) {
    const py::gil_scoped_release release;
    return Opened{adapter::installed()->open_shared(static_cast<c10::DeviceIndex>(device), handle)};
  });
}

}  // namespace

PYBIND11_MODULE(GPUMEMX_TORCH_MODULE, m) {
  m.doc() = "gpumemx as the CUDA allocator of one minor release of torch.";
  m.attr("torch_version") = TORCH_VERSION;
  m.attr("version") = build::kVersion;
  py::register_local_exception_translator(&translate_torch_errors);

  m.def("install", &install, py::arg("conf"), py::arg("arguments"), py::arg("late") = false,
        py::arg("simulated_devices") = 0, py::arg("simulated_bytes") = 0,
        "Make gpumemx torch's allocator. Raises ValueError for a wrong setting, RuntimeError with "
        "the reason otherwise.");
  m.def(
      "is_installed", [] { return adapter::installed() != nullptr; },
      "Whether install() has succeeded in this process.");
  m.def(
      "cuda_started", [] { return adapter::torch_alloc::get()->initialized(); },
      "Whether torch's current allocator is in use already.");
  m.def("settings", &settings, "What is in force: dicts of key, value, source, note.");
  m.def("settings_complaint", &adapter::settings_complaint,
        "What was wrong with the last setAllocatorSettings() text, or ''.");

  m.def(
      "memory_info", [](int device) { return to_dict(DeviceView(device).figures()); },
      py::arg("device"), "Where the bytes are, of whichever allocator torch has. Bytes.");
  m.def(
      "memory_report",
      // With Python's lock held: a thread that has let go of it and wants it back while the interpreter
      // ends is ended by Python, out of a destructor of pybind11's, which ends the process.
      [](int device) { return to_dict(DeviceView(device).report()); }, py::arg("device"),
      "The same by cause, and what clear_cache() would give back.");
  m.def(
      "address_ranges",
      [] {
        std::vector<std::pair<std::uint64_t, std::uint64_t>> out;
        for (const AddrRange& range : adapter::address_ranges())
          out.emplace_back(range.begin.n, range.size.n);
        return out;
      },
      "Begin and size of all addresses at which torch's allocator may have memory, on all "
      "devices; of what other processes share the first byte.");
  m.def(
      "clear_cache",
      [](int device, bool wait) {
        const py::gil_scoped_release release;
        return DeviceView(device).clear_cache(wait);
      },
      py::arg("device"), py::arg("wait") = false, "Give cached memory back to the device.");
  m.def(
      "clear_caches",
      [](bool wait) {
        const py::gil_scoped_release release;
        return adapter::clear_caches(wait);
      },
      py::arg("wait") = false, "The same for all devices that have memory, with their indices.");
  m.def(
      "memory_behind",
      [](std::uintptr_t address) -> py::object {
        const auto found = adapter::installed()->memory_behind(DeviceAddr{address});
        if (!found) return py::none();
        py::list handles;
        for (const AddrRange& h : found->second.handles) {
          handles.append(py::make_tuple(h.begin.n, h.size.n));
        }
        const AddrRange& block = found->second.block;
        return py::make_tuple(found->first, block.begin.n, block.size.n, handles,
                              found->second.plain, found->second.exportable);
      },
      py::arg("address"),
      "Of the live block there: device, address, size, handles as pairs of address and size, "
      "whether "
      "it is plain, whether handles can be exported; or None. REQUIRES: is_installed().");
  m.def(
      "paths", [](int device) { return paths(DeviceView(device).stats()); }, py::arg("device"),
      "How often each way of serving a request was taken.");
  m.def(
      "driver_figures", [](int device) { return to_dict(DeviceView(device).driver_figures()); },
      py::arg("device"),
      "Driver calls and their seconds: by kind, all, those that an allocating thread waited for, "
      "and of those the growth. Empty without gpumemx.");

  py::class_<TrimReport>(m, "TrimReport").def("to_dict", [](const TrimReport& r) {
    return to_dict(r);
  });
  py::class_<adapter::Scope>(m, "Scope", "A region of the program; ends with end().")
      .def(py::init<int, bool>(), py::arg("device"), py::arg("from_start") = false)
      .def_property_readonly("exact", &adapter::Scope::exact,
                             "Whether the peak and the driver's time are known.")
      .def(
          "read", [](adapter::Scope& s) { return to_dict(s.read()); }, "Figures so far. Bytes.")
      .def(
          "end", [](adapter::Scope& s) { return to_dict(s.end()); },
          "Ends the scope; figures of the whole. Bytes.")
      .def("report", &adapter::Scope::report, py::arg("name"), "The figures so far in words.");

  bind_out_of_memory(m);
  bind_simulated(m);
  bind_simulated_history(m);
  bind_simulated_pools(m);
}

}  // namespace gpumemx::bindings
