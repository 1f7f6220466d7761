// SPDX-License-Identifier: BSD-3-Clause
//
// How C++ programs end while they hold device memory. Each case is a process of its own and must end
// with exit code 0:  exit_cases CASE
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "cpp/testbed.hpp"

namespace {

using gpumemx::testbed::kMiB;
using gpumemx::testbed::make_tensor;

// Destroyed after everything that main() has set up, gpumemx's handler at exit among it.
std::shared_ptr<void> the_static;
thread_local std::shared_ptr<void> of_this_thread;

void use_memory() {
  // Something cached and something that the background thread has to do.
  for (int i = 0; i < 8; ++i) (void)make_tensor(64 * kMiB);
}

// A thread that holds a tensor and allocates for as long as it is served: once the process is ending,
// requests fail. It asks the allocator, since torch's operators are taken apart while they may run.
void start_busy_thread() {
  std::thread([] {
    of_this_thread = make_tensor(8 * kMiB);
    try {
      for (;;) {
        gpumemx::testbed::free(gpumemx::testbed::allocate(2 * kMiB));
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    } catch (const std::exception&) {
    }
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  gpumemx::testbed::install({});
  use_memory();
  if (which == "static_tensor") {
    the_static = make_tensor(32 * kMiB);
    static std::shared_ptr<void> of_the_function;
    of_the_function = make_tensor(32 * kMiB);
    return 0;
  }
  if (which == "thread_local_tensor") {
    of_this_thread = make_tensor(32 * kMiB);  // of the main thread
    std::thread([] { of_this_thread = make_tensor(32 * kMiB); }).join();
    return 0;
  }
  if (which == "exit_from_a_thread") {
    the_static = make_tensor(32 * kMiB);
    of_this_thread = make_tensor(32 * kMiB);
    std::thread([] {
      of_this_thread = make_tensor(32 * kMiB);
      std::exit(0);
    }).join();
    return 1;  // not reached
  }
  if (which == "exit_beside_a_busy_thread") {
    start_busy_thread();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return 0;
  }
  if (which == "quick_exit") {
    the_static = make_tensor(32 * kMiB);
    of_this_thread = make_tensor(32 * kMiB);
    std::quick_exit(0);
  }
  if (which == "monitor_and_callback_at_exit") {
    static gpumemx::GPUMonitor whole("program", gpumemx::print_report);
    static const auto registration =
        gpumemx::on_memory_pressure([](const gpumemx::MemoryPressure&) { return false; });
    the_static = make_tensor(32 * kMiB);
    return 0;
  }
  std::fprintf(stderr, "exit_cases: there is no case '%s'\n", which.c_str());
  return 2;
}
