// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/loaded_torch.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <filesystem>
#include <fstream>

namespace gpumemx::adapter {

namespace {

// "2" of the line "#define TORCH_VERSION_MAJOR 2".
std::string defined(const std::string& line, const std::string& name) {
  const std::string begin = "#define " + name + " ";
  return line.rfind(begin, 0) == 0 ? line.substr(begin.size()) : "";
}

}  // namespace

std::string torch_release_in(const std::string& folder) {
  // The second is where it is since 2.9; what stands in the first place includes it.
  for (const char* header : {"torch/version.h", "torch/headeronly/version.h"}) {
    std::ifstream file(std::filesystem::path(folder) / "include" / header);
    std::string line, major, minor;
    while (std::getline(file, line)) {
      if (major.empty()) major = defined(line, "TORCH_VERSION_MAJOR");
      if (minor.empty()) minor = defined(line, "TORCH_VERSION_MINOR");
    }
    if (!major.empty() && !minor.empty()) return major + "." + minor;
  }
  return "";
}

std::optional<std::string> other_torch() {
  Dl_info library{};
  if (dladdr(&c10::cuda::CUDACachingAllocator::allocator, &library) == 0 ||
      library.dli_fname == nullptr) {
    return std::nullopt;
  }
  std::error_code error;
  const auto path = std::filesystem::canonical(library.dli_fname, error);
  if (error) return std::nullopt;
  const std::string folder = path.parent_path().parent_path().string();
  const std::string release = torch_release_in(folder);
  const std::string wanted =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  if (release.empty() || release == wanted) return std::nullopt;
  return "this build of gpumemx is for torch " + wanted + ", and the torch that is loaded (" +
         folder + ") is " + release + ": build gpumemx for that one";
}

}  // namespace gpumemx::adapter
