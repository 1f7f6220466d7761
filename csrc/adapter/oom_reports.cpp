// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/oom_reports.hpp"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "adapter/history.hpp"

namespace gpumemx::adapter {

namespace {

// Stacks of more blocks than this are not looked at, the smallest first: an error should not take
// seconds to be raised.
constexpr std::size_t kMostStacks = 50'000;

// As gpumemx analyze has it (replay/sites.cpp), except that the lines of a session at a prompt, which
// are "<stdin>" or "<ipython-input-...>", are the program here.
bool is_torch(std::string_view file) {
  return file.empty() || file == "??" || file.starts_with("<frozen") ||
         file.starts_with("<eval_with_key") || file.starts_with("torch/") ||
         file.find("-packages/torch/") != std::string_view::npos ||
         file.find("torchinductor_") != std::string_view::npos || file.ends_with(".cpp") ||
         file.find(".so") != std::string_view::npos;
}

std::string site_of(const torch::SymbolizedTracebacks& all,
                    const std::vector<std::uint64_t>& stack) {
  if (stack.empty()) return "(no frames)";
  const auto own = std::find_if(stack.begin(), stack.end(), [&](std::uint64_t i) {
    return !is_torch(all.all_frames[i].filename);
  });
  const auto& frame = all.all_frames[own == stack.end() ? stack.front() : *own];
  return frame.filename + ":" + std::to_string(frame.lineno) + " " + frame.funcname;
}

}  // namespace

std::vector<OomHolder> largest_holders(const MemoryLayout& layout) {
  std::vector<std::pair<Bytes, std::shared_ptr<c10::GatheredContext>>> blocks;
  for (const BlockInfo& block : layout.blocks) {
    if (block.state != BlockState::kLive || block.context == nullptr) continue;
    blocks.emplace_back(block.size, gathered(block.context));
  }
  if (blocks.size() > kMostStacks) {
    std::nth_element(blocks.begin(), blocks.begin() + kMostStacks, blocks.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    blocks.resize(kMostStacks);
  }
  std::vector<torch::CapturedTraceback*> stacks;
  std::vector<Bytes> sizes;
  for (const auto& [size, context] : blocks) {
    auto* stack = dynamic_cast<torch::CapturedTraceback*>(context.get());
    if (stack == nullptr) continue;  // of a recorder that is not torch's
    stacks.push_back(stack);
    sizes.push_back(size);
  }
  if (stacks.empty()) return {};
  const torch::SymbolizedTracebacks all = torch::symbolize(stacks);
  std::unordered_map<std::string, OomHolder> by_site;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::string site = site_of(all, all.tracebacks[i]);
    OomHolder& holder = by_site[site];
    holder.site = std::move(site);
    holder.bytes += sizes[i];
    ++holder.blocks;
  }
  std::vector<OomHolder> holders;
  holders.reserve(by_site.size());
  for (auto& [site, holder] : by_site) holders.push_back(std::move(holder));
  std::sort(holders.begin(), holders.end(), [](const OomHolder& a, const OomHolder& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.site < b.site;
  });
  if (holders.size() > kOomHolders) holders.resize(kOomHolders);
  return holders;
}

std::shared_ptr<const OomReport> OomReports::add(OomReport report) {
  std::vector<Listener> listeners;
  std::shared_ptr<const OomReport> added;
  {
    MutexLock lock(mu_);
    // With the process's number: an error of a worker, raised again here, has no report here.
    report.id = std::to_string(getpid()) + "-" + std::to_string(++count_);
    added = std::make_shared<const OomReport>(std::move(report));
    reports_.push_back(added);
    if (reports_.size() > kKept) reports_.pop_front();
    listeners = listeners_;
  }
  for (const Listener& listener : listeners) {
    try {
      listener(*added);
    } catch (const std::exception& error) {
      LOG(ERROR) << "gpumemx: a listener for failed allocations failed: " << error.what();
    }
  }
  return added;
}

std::shared_ptr<const OomReport> OomReports::find(const std::string& id) const {
  MutexLock lock(mu_);
  const auto found = std::find_if(reports_.begin(), reports_.end(),
                                  [&](const auto& report) { return report->id == id; });
  return found == reports_.end() ? nullptr : *found;
}

std::shared_ptr<const OomReport> OomReports::latest() const {
  MutexLock lock(mu_);
  return reports_.empty() ? nullptr : reports_.back();
}

void OomReports::listen(Listener listener) {
  MutexLock lock(mu_);
  listeners_.push_back(std::move(listener));
}

}  // namespace gpumemx::adapter
