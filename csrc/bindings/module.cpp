// SPDX-License-Identifier: BSD-3-Clause
//
// gpumemx._core. Only translation lives in this folder: arguments in, results out, errors to
// exceptions. A function with a decision in it belongs below, where C++ tests reach it.
#include <pybind11/pybind11.h>

#include <string>

#include "base/text.hpp"
#include "base/version.hpp"
#include "bindings/bind_replay.hpp"
#include "bindings/bind_runtime.hpp"
#include "bindings/bind_snapshot.hpp"
#include "bindings/docstrings.hpp"

namespace py = pybind11;

namespace gpumemx::bindings {

namespace {

#ifdef GPUMEMX_HAVE_CUDA_DRIVER
constexpr bool kHasCudaDriver = true;
#else
constexpr bool kHasCudaDriver = false;
#endif

py::object text_or_none(const char* text) {
  if (*text == '\0') return py::none();
  return py::str(text);
}

py::dict build_info() {
  py::dict info;
  info["version"] = build::kVersion;
  info["compiler"] = build::kCompiler;
  info["build_type"] = build::kBuildType;
  info["sanitizers"] = text_or_none(build::kSanitizers);
  info["paranoid"] = build::kParanoid;
  info["cuda_driver"] = kHasCudaDriver;
  info["cuda"] = text_or_none(kHasCudaDriver ? build::kCuda : "");
  info["torch_adapter"] = build::kTorchAdapter;
  info["torch"] = text_or_none(build::kTorch);
  info["torch_cuda"] = text_or_none(build::kTorchCuda);
  return info;
}

std::uint64_t parse(const std::string& text) {
  if (const auto size = parse_bytes(text)) return size->n;
  throw py::value_error("'" + text + "' is not a size; write it like 24GiB, 512MiB or 1000000");
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = kModuleDoc;
  module.attr("__version__") = build::kVersion;
  module.def("build_info", &build_info, kBuildInfoDoc);
  module.def("parse_bytes", &parse, py::arg("text"), kParseBytesDoc);
  module.def(
      "format_bytes", [](std::uint64_t size) { return format_bytes({size}); }, py::arg("size"),
      kFormatBytesDoc);
  bind_replay(module);
  bind_runtime(module);
  bind_snapshot(module);
}

}  // namespace gpumemx::bindings
