// SPDX-License-Identifier: BSD-3-Clause
//
// A memory snapshot as torch.cuda.memory._dump_snapshot() writes it: what stood on each device when
// it was taken, and the events that were recorded before. Read from any torch since 2.0, and from the
// bare list of segments of torch.cuda.memory.memory_snapshot().
//
// Columns and tables, not objects: a trace entry takes 42 bytes, and each different text, frame and
// stack is kept once. Keys that are not named here are skipped, so a newer torch can be read too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"
#include "replay/pickle.hpp"

namespace gpumemx {

enum class TraceAction : std::uint8_t {
  kAlloc,
  kFreeRequested,  // the program freed
  kFreeCompleted,  // the block can be used again
  kSegmentAlloc,
  kSegmentFree,
  kSegmentMap,  // the last two: a piece of an expandable segment
  kSegmentUnmap,
  kSnapshot,
  kOom,
  kOther,  // of a torch newer than this list
};

struct SnapshotFrame {
  std::uint32_t file = 0;  // the first two: numbers of texts
  std::uint32_t function = 0;
  std::uint32_t line = 0;

  friend bool operator==(const SnapshotFrame&, const SnapshotFrame&) = default;
};

// Stacks by number, innermost frame first; each different one once. Stack 0 has no frames.
class StackTable {
 public:
  StackTable() { stack({}); }
  std::uint32_t frame(const SnapshotFrame& frame);
  std::uint32_t stack(std::span<const std::uint32_t> frames);

  std::span<const std::uint32_t> operator[](std::uint32_t stack) const {
    const std::size_t begin = ends_[stack];
    return std::span(frames_of_stacks_).subspan(begin, ends_[stack + 1] - begin);
  }
  const SnapshotFrame& frame_at(std::uint32_t frame) const { return frames_[frame]; }
  std::size_t size() const { return ends_.size() - 1; }

 private:
  struct Hash {
    std::size_t operator()(const SnapshotFrame& frame) const;
  };

  std::vector<SnapshotFrame> frames_;
  std::unordered_map<SnapshotFrame, std::uint32_t, Hash> frame_numbers_;
  std::vector<std::uint32_t> frames_of_stacks_;
  std::vector<std::size_t> ends_{0};
  std::unordered_multimap<std::uint64_t, std::uint32_t> stack_numbers_;  // by hash
};

// The recorded events of all devices, a column each.
struct SnapshotEntries {
  std::vector<TraceAction> action;
  std::vector<std::uint64_t> addr;    // of kOom: the device's free memory, kNoNumber if not told
  std::vector<std::uint64_t> size;    // asked for; of segment events: what the device gave
  std::vector<std::int64_t> time_us;  // since 1970; -1: not recorded
  std::vector<std::uint16_t> stream;  // index into Snapshot::streams
  std::vector<std::uint32_t> stack;
  std::vector<std::uint32_t> metadata;  // text that the program attached

  static constexpr std::uint64_t kNoNumber = UINT64_MAX;
  std::size_t rows() const { return action.size(); }
  void append(const SnapshotEntries& from, std::size_t row);
};

enum class BlockState : std::uint8_t { kFree, kLive, kPending };

struct SnapshotBlock {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint64_t requested = 0;
  std::uint32_t stack = 0;
  BlockState state = BlockState::kFree;
};

struct SnapshotSegment {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  int device = 0;
  std::uint16_t stream = 0;
  bool expandable = false;    // one piece of it, mapped without a gap
  bool private_pool = false;  // serves one CUDA graph or MemPool only
  std::size_t first_block = 0;
  std::size_t blocks = 0;
};

struct DeviceEntries {
  std::size_t first = 0;
  std::size_t count = 0;
};

struct Snapshot {
  // Largest values that are taken for true. 2^48 bytes are 256 TiB, 2^53 us are 285 years.
  static constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 48;
  static constexpr std::int64_t kMaxTime = std::int64_t{1} << 53;
  static constexpr int kMaxDevices = 1024;
  static constexpr std::size_t kMaxStreams = 32767;

  std::string schema;  // what the file tells, in words
  TextTable texts;
  StackTable stacks;
  std::vector<std::int64_t>
      streams;  // by index; in torch: the address of the stream, 0 the default

  bool has_segments = false;  // the file says what stood on the devices
  std::vector<SnapshotSegment> segments;
  std::vector<SnapshotBlock> blocks;

  SnapshotEntries entries;
  std::vector<DeviceEntries> devices;  // by device index; those without a trace have count 0
  std::optional<bool> overflowed;      // where torch says so: the ring was full and lost entries

  std::span<const SnapshotBlock> blocks_of(const SnapshotSegment& segment) const {
    return std::span(blocks).subspan(segment.first_block, segment.blocks);
  }
};

// Fails: kInvalidArgument, with one sentence on what is wrong, where, and what to do.
Result<Snapshot> read_snapshot(PickleInput& input, const ReadProgress& progress = {});
Result<Snapshot> read_snapshot(const std::string& path, const ReadProgress& progress = {});

}  // namespace gpumemx
