// SPDX-License-Identifier: BSD-3-Clause
//
// Where a block was allocated, in words: the line of the program that asked for it, and what the
// block is to a training run, as far as its stack tells.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "replay/recorded_run.hpp"

namespace gpumemx {

enum class Category : std::uint8_t {
  kParameters,
  kGradients,
  kOptimizerState,
  kActivations,
  kWorkspaces,
  kUnknown,
};
inline constexpr std::size_t kCategories = 6;
const char* to_string(Category category);

class Sites {
 public:
  // Keeps the reference. `run` tells whether stacks were recorded at all.
  Sites(const Snapshot& snapshot, const RecordedRun& run);

  // Both remember what they found for a stack: looking at one can be long, and few are different.
  //
  // "file:line function" of the innermost frame that is not torch's: of Python or, where there is none,
  // of C++; else of the innermost. Without frames what the program attached, else what is known of the
  // block.
  const std::string& site(const RecordedBlock& block);
  Category category(const RecordedBlock& block);

 private:
  struct Frame {
    std::string_view file, function;
    std::uint32_t line = 0;
  };
  Frame frame(std::uint32_t number) const;
  std::string site_of_stack(std::uint32_t stack) const;
  Category category_of_stack(std::uint32_t stack) const;

  const Snapshot& snapshot_;
  bool has_stacks_ = false;
  std::unordered_map<std::uint32_t, std::string> sites_, attached_;  // by stack; by text
  std::unordered_map<std::uint32_t, Category> categories_;           // by stack
};

}  // namespace gpumemx
