// SPDX-License-Identifier: BSD-3-Clause
//
// Captures and graphs of the simulated device.
#include "driver/sim/sim_captures.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "base/check.hpp"

namespace gpumemx {

namespace {

std::atomic<std::uint64_t> next_instance{1};

// Only modes other than the default stand here, so that a device that is gone leaves nothing.
// A plain array: exchange_mode() is also called while a thread ends, when a vector would be gone.
struct ThreadModes {
  struct Entry {
    std::uint64_t instance;
    CaptureMode mode;
  };
  std::array<Entry, 64> entries;
  std::size_t count;
};
thread_local ThreadModes modes_of_this_thread;  // zeroed

}  // namespace

SimCaptures::SimCaptures() : instance_(next_instance.fetch_add(1, std::memory_order_relaxed)) {}

CaptureMode SimCaptures::mode_of_caller() const {
  const ThreadModes& modes = modes_of_this_thread;
  for (std::size_t i = 0; i < modes.count; ++i) {
    if (modes.entries[i].instance == instance_) return modes.entries[i].mode;
  }
  return CaptureMode::kGlobal;
}

CaptureMode SimCaptures::exchange_mode(CaptureMode mode) {
  ThreadModes& modes = modes_of_this_thread;
  for (std::size_t i = 0; i < modes.count; ++i) {
    if (modes.entries[i].instance != instance_) continue;
    const CaptureMode before = std::exchange(modes.entries[i].mode, mode);
    if (mode == CaptureMode::kGlobal) modes.entries[i] = modes.entries[--modes.count];
    return before;
  }
  if (mode != CaptureMode::kGlobal) {
    GPUMEMX_CHECK(modes.count < modes.entries.size(),
                  "a thread holds capture modes of 64 simulated devices at once");
    modes.entries[modes.count++] = {instance_, mode};
  }
  return CaptureMode::kGlobal;
}

void SimCaptures::begin(StreamRef stream, CaptureMode mode, std::uint64_t serial) {
  auto capture = std::make_unique<Capture>();
  capture->stream = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->serial = serial;
  capture->graph.captured_by = serial;
  captures_.push_back(std::move(capture));
}

SimCaptures::Capture* SimCaptures::find(StreamId stream) {
  for (const auto& capture : captures_) {
    if (capture->stream.id == stream) return capture.get();
  }
  return nullptr;
}

GraphId SimCaptures::end(StreamId stream) {
  const auto it = std::find_if(captures_.begin(), captures_.end(),
                               [&](const auto& capture) { return capture->stream.id == stream; });
  GraphId id{};
  if ((*it)->is_valid) {
    id = GraphId{next_graph_++};
    graphs_.emplace(id, std::move((*it)->graph));
  }
  captures_.erase(it);
  return id;
}

std::vector<const SimCaptures::Capture*> SimCaptures::invalidate_for_caller() {
  std::vector<const Capture*> ended;
  const CaptureMode mine = captures_.empty() ? CaptureMode::kRelaxed : mode_of_caller();
  if (mine == CaptureMode::kRelaxed) return ended;
  for (const auto& capture : captures_) {
    const bool is_of_caller = capture->thread == std::this_thread::get_id();
    const bool is_forbidden =
        (is_of_caller && capture->mode != CaptureMode::kRelaxed) ||
        (mine == CaptureMode::kGlobal && capture->mode == CaptureMode::kGlobal);
    if (!is_forbidden) continue;
    capture->is_valid = false;
    ended.push_back(capture.get());
  }
  return ended;
}

const SimCaptures::Graph* SimCaptures::find(GraphId graph) const {
  const auto it = graphs_.find(graph);
  return it == graphs_.end() ? nullptr : &it->second;
}

void SimCaptures::destroy(GraphId graph) { graphs_.erase(graph); }

}  // namespace gpumemx
