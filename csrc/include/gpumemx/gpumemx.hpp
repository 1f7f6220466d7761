// SPDX-License-Identifier: BSD-3-Clause
//
// gpumemx for LibTorch programs: everything, in one include.
//
//   #include <gpumemx/gpumemx.hpp>
//
//   int main() {
//     gpumemx::install_allocator();  // before the first CUDA tensor
//     ...
//     {
//       gpumemx::GPUMonitor step("train step", gpumemx::print_report);
//       ...
//     }
//     std::cout << gpumemx::memory_summary() << '\n';
//   }
//
// C++17; no header of torch or CUDA is included. docs/cpp.md is the guide.
#pragma once

#include <gpumemx/allocator.hpp>
#include <gpumemx/errors.hpp>
#include <gpumemx/history.hpp>
#include <gpumemx/memory.hpp>
#include <gpumemx/monitor.hpp>
#include <gpumemx/pressure.hpp>
#include <gpumemx/version.hpp>

/// @mainpage gpumemx for C++
///
/// A CUDA caching allocator for LibTorch programs, and functions that show where GPU memory is.
/// gpumemx::install_allocator() makes it torch's allocator, gpumemx::memory_summary() and
/// gpumemx::memory_info() say what is where, gpumemx::GPUMonitor measures a part of a program,
/// gpumemx::clear_cache() and gpumemx::trim_to() give memory back,
/// gpumemx::on_memory_pressure() is asked before a request fails, and gpumemx::save_snapshot() writes
/// the file that `gpumemx analyze` and pytorch.org/memory_viz read.

/// The public interface: what these headers document. Nothing else in this namespace is.
namespace gpumemx {}
