// SPDX-License-Identifier: BSD-3-Clause
//
// gpumemx's own core over the simulated device. Its clock is the trace's time plus what requests
// have waited for streams so far. Work of a stream, and so an event on it, completes a lag after it
// was queued: the device runs that far behind the host. Streams live as long as the replay, as
// torch's do.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"
#include "replay/policy_model.hpp"

namespace gpumemx {

class GpumemxModel final : public PolicyModel {
 public:
  // The device has the lower of the limits. REQUIRES: options.validate() finds nothing.
  GpumemxModel(const Options& options, const MemoryLimits& limits, double lag_ms);

  void advance_to(std::int64_t time_us) override;
  std::optional<BlockRef> allocate(Bytes size, std::int16_t stream) override;
  void free(BlockRef block) override;
  void background() override;
  PolicyFigures figures() const override;

 private:
  const StreamInfo& stream(std::int16_t index);

  SimDriver device_;
  DeviceAllocator allocator_;
  const bool background_;
  std::vector<std::optional<StreamInfo>> streams_;  // by the trace's index, made at first use
  std::int64_t time_us_ = 0;
  std::int64_t waited_us_ = 0;
};

}  // namespace gpumemx
