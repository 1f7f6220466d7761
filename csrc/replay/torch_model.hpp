// SPDX-License-Identifier: BSD-3-Clause
//
// torch's own CUDA allocator (c10's CUDACachingAllocator, torch 2.11), as far as it decides what
// memory is held: rounding, pools, best fit, splitting, merging, and what it gives back before it
// runs out of memory. With expandable segments it is the policy `expandable`, without `native`.
//
// What a program frees may be used again at once, as torch does for blocks of one stream; a request
// waits for nothing, so what is given back to the device is free at once. Work recorded on further
// streams is not in a trace.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <vector>

#include "driver/cost_model.hpp"
#include "replay/device_addresses.hpp"
#include "replay/policy_model.hpp"
#include "replay/torch_options.hpp"

namespace gpumemx {

class TorchModel final : public PolicyModel {
 public:
  // REQUIRES: options.validate() finds nothing.
  TorchModel(const TorchOptions& options, const MemoryLimits& limits);
  ~TorchModel() override;
  TorchModel(const TorchModel&) = delete;
  TorchModel& operator=(const TorchModel&) = delete;

  void advance_to(std::int64_t) override {}
  std::optional<BlockRef> allocate(Bytes size, std::int16_t stream) override;
  void free(BlockRef block) override;
  bool observe_segments(SegmentObserver observer) override;
  PolicyFigures figures() const override;

 private:
  struct Block;
  struct Pool;
  struct Request;

  // --- blocks
  Block* new_block(DeviceAddr address, Bytes size, std::int16_t stream, Pool& pool);
  void drop_block(Block* block);
  void insert_free(Block* block);
  void merge_into(Block* block, Block* neighbour);
  void merge_with_neighbours(Block* block);
  Block* split_front(Block* block, Bytes size);
  bool keeps_rest(const Block& block, Bytes size) const;

  // --- a request, way by way
  Block* find_free(const Request& request);
  Block* take_new(const Request& request);
  bool release_oversize(const Request& request);
  void release_all_cached();
  void collect_garbage();

  // --- plain segments
  Block* take_segment(const Request& request);
  void release_segment(Block* block);

  // --- expandable segments
  Block* grow(const Request& request);
  Block* room_to_grow(const Request& request);
  bool map(Block* block, Bytes size);
  void unmap(Block* block);

  void hold(AddrRange range, std::int16_t stream);
  void give_back(AddrRange range, std::int16_t stream);
  void charge(DriverCall call, Bytes size);

  const TorchOptions options_;
  const MemoryLimits limits_;  // none is 0
  const bool capped_;
  std::deque<Block> blocks_;
  std::vector<Block*> spare_;
  std::vector<Pool> pools_;  // small, large
  DeviceAddresses addresses_;
  std::uint64_t next_segment_ = 0;
  Bytes reserved_;
  Bytes reserved_peak_;
  DriverMeter meter_;
  CostModel costs_;
  std::uint64_t hits_ = 0;
  std::uint64_t misses_ = 0;
  std::uint64_t retries_ = 0;
  SegmentObserver observer_;
};

}  // namespace gpumemx
