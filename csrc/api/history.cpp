// SPDX-License-Identifier: BSD-3-Clause
#include <cerrno>
#include <fstream>
#include <gpumemx/history.hpp>
#include <stdexcept>
#include <system_error>

#include "adapter/device_view.hpp"
#include "adapter/recording.hpp"

namespace gpumemx {

void enable_history(const HistoryOptions& options) {
  if (options.max_entries == 0) {
    throw std::invalid_argument(
        "enable_history(): max_entries is 0, and at least one event has to be kept; "
        "disable_history() records none");
  }
  adapter::start_recording(options.max_entries, options.stacks);
}

void disable_history() { adapter::stop_recording(); }

bool history_enabled() { return adapter::is_recording(); }

void save_snapshot(const std::string& path) {
  if (!adapter::torch_alloc::get()->initialized()) {
    throw std::logic_error("save_snapshot(): CUDA has not started, so there is nothing to save");
  }
  errno = 0;
  std::ofstream file(path, std::ios::binary);  // before the work: a wrong path costs nothing then
  if (file) {
    const std::string bytes = adapter::pickled_snapshot();
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
  }
  if (!file) {
    throw std::system_error(errno != 0 ? errno : EIO, std::generic_category(),
                            "save_snapshot(): cannot write '" + path + "'");
  }
}

}  // namespace gpumemx
