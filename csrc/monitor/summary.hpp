// SPDX-License-Identifier: BSD-3-Clause
//
// Memory figures as a table and a sentence for people.
#pragma once

#include <string>

#include "core/allocator.hpp"
#include "core/memory_report.hpp"
#include "core/oom.hpp"

namespace gpumemx {

// At most 72 columns wide; the parts add up to the total. `allocator` is whose figures these are:
// "gpumemx", "torch". `note` is a last line about what the figures leave out; may be empty.
// `workspaces`: of live, cuBLAS's, as far as known. Lines of causes that hold nothing are left out.
std::string summary_table(int device, const std::string& allocator, const MemoryReport& report,
                          Bytes workspaces, const std::string& note);

// What is worth knowing about the state, in one sentence.
std::string state_in_words(const MemoryFigures& figures);

// What a trim gave back, and what stayed and why.
std::string describe(const TrimReport& report);

}  // namespace gpumemx
