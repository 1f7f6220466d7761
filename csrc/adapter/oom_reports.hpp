// SPDX-License-Identifier: BSD-3-Clause
//
// The reports of requests that failed, for who asks later: an error carries text only, so its text
// has the number of its report. The last ones are kept.
//
// Threads: any. Listeners are told with no lock of ours held, before the error is raised.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "core/allocator.hpp"
#include "monitor/oom_report.hpp"

namespace gpumemx::adapter {

// Who holds live memory, by the innermost Python line that is not torch's: blocks without a stack
// don't count. Takes Python's lock where stacks were recorded. REQUIRES: no lock of ours is held.
std::vector<OomHolder> largest_holders(const MemoryLayout& layout);

class OomReports {
 public:
  using Listener = std::function<void(const OomReport&)>;
  static constexpr std::size_t kKept = 256;

  // Numbers the report, keeps it and tells the listeners; what they throw is logged.
  std::shared_ptr<const OomReport> add(OomReport report) GPUMEMX_EXCLUDES(mu_);
  // Null when there is none, or it was long ago.
  std::shared_ptr<const OomReport> find(const std::string& id) const GPUMEMX_EXCLUDES(mu_);
  std::shared_ptr<const OomReport> latest() const GPUMEMX_EXCLUDES(mu_);
  // For ever.
  void listen(Listener listener) GPUMEMX_EXCLUDES(mu_);

 private:
  mutable Mutex mu_;  // a leaf
  std::uint64_t count_ GPUMEMX_GUARDED_BY(mu_) = 0;
  std::deque<std::shared_ptr<const OomReport>> reports_ GPUMEMX_GUARDED_BY(mu_);
  std::vector<Listener> listeners_ GPUMEMX_GUARDED_BY(mu_);
};

}  // namespace gpumemx::adapter
