// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/loaded_torch.hpp"

#include <gtest/gtest.h>
#include <torch/version.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace gpumemx::adapter {
namespace {

namespace fs = std::filesystem;

TEST(LoadedTorch, IsTheOneThatThisWasBuiltFor) { EXPECT_EQ(other_torch(), std::nullopt); }

TEST(LoadedTorch, ReadsTheReleaseFromTheHeadersOfAFolder) {
  const std::string built =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  EXPECT_EQ(torch_release_in(GPUMEMX_TORCH_ROOT), built);

  const fs::path folder = fs::temp_directory_path() / ("gpumemx-" + std::to_string(getpid()));
  EXPECT_EQ(torch_release_in(folder.string()), "");
  fs::create_directories(folder / "include/torch/headeronly");
  std::ofstream(folder / "include/torch/version.h") << "#include <torch/headeronly/version.h>\n";
  EXPECT_EQ(torch_release_in(folder.string()), "");
  std::ofstream(folder / "include/torch/headeronly/version.h")
      << "#pragma once\n#define TORCH_VERSION_MAJOR 3\n#define TORCH_VERSION_MINOR 1\n"
         "#define TORCH_VERSION_PATCH 7\n";
  EXPECT_EQ(torch_release_in(folder.string()), "3.1");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace gpumemx::adapter
