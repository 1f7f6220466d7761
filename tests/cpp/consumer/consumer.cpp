// SPDX-License-Identifier: BSD-3-Clause
//
// Uses the installed library as a stranger would, on a machine with or without a device. Exit status 0
// when all of it did what the headers say.
#include <cstdio>
#include <gpumemx/gpumemx.hpp>
#include <string>

#if __cplusplus >= 202002L
#error "this program shows that C++17 is enough"
#endif

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "consumer: not so: %s\n", what);
  ++failures;
}

}  // namespace

int main() {
  check(std::string(gpumemx::version()) == GPUMEMX_VERSION, "library and headers are one version");
  check(!gpumemx::is_installed(), "nothing is installed before it is asked for");
  try {
    gpumemx::install_allocator({{"cpa", "1GiB"}});
    check(false, "a wrong setting throws");
  } catch (const gpumemx::SettingError& error) {
    check(std::string(error.what()).find("'cap'") != std::string::npos, "the nearest name is told");
  }
  gpumemx::install_allocator({{"cap", "1GiB"}, {"background", false}});
  check(gpumemx::is_installed(), "it is installed");
  try {
    gpumemx::install_allocator({{"cap", "2GiB"}});
    check(false, "other settings throw");
  } catch (const gpumemx::InstallError&) {
  }
  for (const gpumemx::Setting& setting : gpumemx::settings()) {
    if (setting.key == "cap") check(setting.value == "1GiB", "the cap is in force");
  }

  const gpumemx::MemoryInfo info = gpumemx::memory_info();
  check(info.allocator == "none" && info.live == 0, "nothing was allocated");
  check(gpumemx::memory_summary() == "GPU 0: nothing was allocated there yet.", "the summary");
  check(gpumemx::clear_cache().released == 0, "nothing is cached");
  check(gpumemx::trim_to(0).kept == 0, "nothing is kept");

  int reports = 0;
  {
    gpumemx::GPUMonitor monitor("step", [&](const gpumemx::GPUMonitor& ended) {
      ++reports;
      check(ended.peak() == 0 && ended.name() == "step", "the monitor's figures");
    });
    auto registration =
        gpumemx::on_memory_pressure([](const gpumemx::MemoryPressure&) { return false; });
  }
  check(reports == 1, "the monitor reports once");

  gpumemx::enable_history();
  check(gpumemx::history_enabled(), "the history is on");
  gpumemx::disable_history();
  check(!gpumemx::history_enabled(), "the history is off");
  try {
    gpumemx::save_snapshot("snapshot.pickle");
    check(false, "there is nothing to save yet");
  } catch (const std::logic_error&) {
  }
  std::printf("gpumemx %s: %d failures\n", gpumemx::version(), failures);
  return failures == 0 ? 0 : 1;
}
