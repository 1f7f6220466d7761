// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/bind_runtime.hpp"

#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "bindings/docstrings.hpp"
#include "runtime/setting_set.hpp"
#ifdef GPUMEMX_HAVE_CUDA_DRIVER
#include "driver/cuda/cuda_driver.hpp"
#endif

namespace py = pybind11;

namespace gpumemx::bindings {

namespace {

py::list gather_settings(const std::string& conf,
                         const std::map<std::string, std::string>& arguments) {
  std::vector<ConfPair> pairs;
  for (const auto& [key, value] : arguments) pairs.push_back({key, value});
  SettingSet settings;
  if (auto wrong = settings.gather(conf, pairs)) throw py::value_error(*wrong);
  py::list out;
  for (const SettingSet::Entry& e : settings.list()) {
    py::dict d;
    d["key"] = e.key;
    d["value"] = e.value;
    d["source"] = e.source;
    d["note"] = e.note;
    out.append(d);
  }
  return out;
}

#ifdef GPUMEMX_HAVE_CUDA_DRIVER
py::dict probe_device(int device) {
  auto opened = CudaDriver::open(device);
  if (!opened.ok()) throw std::runtime_error(opened.error().where);
  const DeviceTraits traits = opened.value()->traits();
  const auto memory = opened.value()->memory();
  if (!memory.ok()) throw std::runtime_error(memory.error().where);
  py::dict d;
  d["virtual_memory"] = traits.virtual_memory;
  d["exportable"] = traits.exportable;
  d["granularity"] = traits.granularity.n;
  d["free"] = memory.value().free.n;
  d["total"] = memory.value().total.n;
  return d;
}
#else
py::dict probe_device(int) {
  throw std::runtime_error("gpumemx was built without CUDA's headers, so without its CUDA driver");
}
#endif

}  // namespace

void bind_runtime(py::module_& module) {
  module.def("gather_settings", &gather_settings, py::arg("conf"), py::arg("arguments"),
             kGatherSettingsDoc);
  module.def("unknown_environment", &SettingSet::unknown_environment, py::arg("names"),
             kUnknownEnvironmentDoc);
  module.def("probe_device", &probe_device, py::arg("device"), kProbeDeviceDoc);
}

}  // namespace gpumemx::bindings
