// SPDX-License-Identifier: BSD-3-Clause
//
// A context that destroys itself, and says so.
#pragma once

#include "core/context.hpp"

namespace gpumemx {

class CountedContext final : public Context {
 public:
  // Nobody refers to it yet. `ended`, if given, is counted up at its end.
  explicit CountedContext(int* ended) : ended_(ended) {}

 private:
  void unreferenced() noexcept override {
    if (ended_ != nullptr) ++*ended_;
    delete this;
  }

  int* ended_;
};

inline ContextRef make_context(int* ended = nullptr) {
  return ContextRef(new CountedContext(ended));
}

}  // namespace gpumemx
