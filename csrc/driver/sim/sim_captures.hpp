// SPDX-License-Identifier: BSD-3-Clause
//
// Captures of streams into graphs, and the rule that makes them delicate: some driver calls made by
// any thread end a capture as invalid, unless the calling thread's capture mode is relaxed.
//
// Not thread-safe, the mode of a thread apart: owned by SimDriver, used under its mutex.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/units.hpp"
#include "driver/device_driver.hpp"
#include "driver/sim/sim_options.hpp"

namespace gpumemx {

class SimCaptures {
 public:
  // One launch of a capture: what it touches, each time that it is replayed.
  using Launch = std::vector<Access>;
  struct Graph {
    std::vector<Launch> launches;
    std::uint64_t captured_by = 0;  // serial of the begin_capture()
  };
  struct Capture {
    StreamRef stream;
    CaptureMode mode = CaptureMode::kGlobal;
    std::thread::id thread;
    std::uint64_t serial = 0;
    bool is_valid = true;
    Graph graph;
  };

  SimCaptures();

  // The mode of the calling thread towards this device; exchange() needs no lock.
  CaptureMode mode_of_caller() const;
  CaptureMode exchange_mode(CaptureMode mode);

  void begin(StreamRef stream, CaptureMode mode, std::uint64_t serial);
  Capture* find(StreamId stream);  // null when the stream does not capture
  GraphId end(StreamId stream);    // REQUIRES: find(stream). No graph (0) when it is invalid.

  // For a call that captures forbid: those that it ends, which are invalid from here on.
  std::vector<const Capture*> invalidate_for_caller();

  const Graph* find(GraphId graph) const;
  void destroy(GraphId graph);

 private:
  const std::uint64_t instance_;  // tells devices apart in the modes of a thread
  std::vector<std::unique_ptr<Capture>> captures_;
  std::unordered_map<GraphId, Graph> graphs_;
  std::uint64_t next_graph_ = 1;
};

}  // namespace gpumemx
