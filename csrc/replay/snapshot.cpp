// SPDX-License-Identifier: BSD-3-Clause
#include "replay/snapshot.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "replay/paged_vector.hpp"

namespace gpumemx {

namespace {

using Kind = PickleValue::Kind;
using Mistake = PickleBuilder::Mistake;

// The keys that are looked at. Their texts are numbered first, so a key's text number is its value
// here, and a dict is told by a mask of the keys that it has.
enum Key : std::uint32_t {
  kAction,
  kAddr,
  kDeviceFree,
  kSize,
  kStream,
  kTimeUs,
  kFrames,
  kUserMetadata,
  kCompileContext,
  kPoolId,
  kName,
  kFilename,
  kLine,
  kAddress,
  kState,
  kRequestedSize,
  kHistory,
  kRealSize,
  kTotalSize,
  kSegmentPoolId,
  kIsExpandable,
  kDevice,
  kBlocks,
  kStage,
  kSegments,
  kDeviceTraces,
  kAllocatorSettings,
  kExternalAnnotations,
  kOverflowed,
  kKeys,
};

constexpr std::array<const char*, kKeys> kKeyTexts = {
    "action",
    "addr",
    "device_free",
    "size",
    "stream",
    "time_us",
    "frames",
    "user_metadata",
    "compile_context",
    "pool_id",
    "name",
    "filename",
    "line",
    "address",
    "state",
    "requested_size",
    "history",
    "real_size",
    "total_size",
    "segment_pool_id",
    "is_expandable",
    "device",
    "blocks",
    "stage",
    "segments",
    "device_traces",
    "allocator_settings",
    "external_annotations",
    "trace_alloc_overflowed",
};

constexpr std::uint64_t bit(Key key) { return std::uint64_t{1} << key; }

constexpr std::array<const char*, 9> kActionTexts = {
    "alloc",       "free_requested", "free_completed", "segment_alloc", "segment_free",
    "segment_map", "segment_unmap",  "snapshot",       "oom",
};

// Lists and dicts that are part of the file but not (yet) of what is kept. 134 million of them take
// 1 GiB; a snapshot of 1 GB has about 45 million.
constexpr std::size_t kMaxObjects = std::size_t{1} << 27;
// Those of them whose items are still needed. In a snapshot: what is being written at the moment.
constexpr std::size_t kMaxOpen = std::size_t{1} << 24;
constexpr std::size_t kMaxRows = std::size_t{1} << 28;

constexpr char kChangedLater[] =
    "a list or dict is changed after it was complete, which no torch does";

// What became of a list or dict.
enum class ObjectState : std::uint8_t {
  kEmpty,
  kOpen,   // its items are in open_[index]
  kOther,  // a dict that is of no use here
  kTaken,  // a list or segment that has its place in the snapshot, and may not have a second one:
           // a small file could say a large one many times
  kFrame,  // from here on: a row of a table
  kStack,
  kEntry,
  kBlock,
  kSegment,
};

struct Object {
  std::uint64_t bits = 0;

  Object() = default;
  Object(ObjectState state, std::uint64_t index)
      : bits(index << 4 | static_cast<std::uint64_t>(state)) {}
  ObjectState state() const { return static_cast<ObjectState>(bits & 15); }
  std::size_t index() const { return bits >> 4; }
};

using Fields = std::array<PickleValue, kKeys>;

std::string quoted(Key key) { return std::string("'") + kKeyTexts[key] + "'"; }

class SnapshotBuilder final : public PickleBuilder {
 public:
  SnapshotBuilder() {
    for (const char* text : kKeyTexts) constants_.texts.number(text);
    for (const char* text : kActionTexts) actions_.push_back(constants_.texts.number(text));
    live_ = constants_.texts.number("active_allocated");
    free_ = constants_.texts.number("inactive");
    empty_text_ = constants_.texts.number("");
  }

  PickleConstants& constants() { return constants_; }

  PickleValue new_list() override { return new_object(Kind::kList); }
  PickleValue new_dict() override { return new_object(Kind::kDict); }
  // Of tuples only pools' ids are of interest, and of them whether they are a private pool's.
  PickleValue new_tuple(std::span<const PickleValue> items) override {
    const bool other = std::any_of(items.begin(), items.end(), [&](PickleValue item) {
      return constants_.as_int(item).value_or(0) != 0;
    });
    return {Kind::kTuple, other};
  }

  Mistake extend(PickleValue list, std::span<const PickleValue> items) override {
    if (objects_.size() > kMaxObjects) return "too large: more than 2^27 lists and dicts";
    if (items.empty()) return {};
    Object& object = objects_[list.number()];
    if (object.state() == ObjectState::kEmpty) {
      if (auto mistake = open(object)) return mistake;
    }
    if (object.state() != ObjectState::kOpen) return kChangedLater;
    std::vector<PickleValue>& held = open_[object.index()];
    held.insert(held.end(), items.begin(), items.end());
    return {};
  }

  Mistake set_items(PickleValue dict, std::span<const PickleValue> items) override {
    if (objects_.size() > kMaxObjects) return "too large: more than 2^27 lists and dicts";
    Object& object = objects_[dict.number()];
    Fields fields;
    std::uint64_t mask = 0;
    const auto take = [&](std::span<const PickleValue> pairs) {
      for (std::size_t i = 0; i < pairs.size(); i += 2) {
        if (!pairs[i].is(Kind::kText) || pairs[i].text() >= kKeys) continue;
        fields[pairs[i].text()] = pairs[i + 1];
        mask |= std::uint64_t{1} << pairs[i].text();
      }
    };
    if (object.state() == ObjectState::kOpen) take(open_[object.index()]);
    const std::uint64_t before = mask;
    take(items);
    if (object.state() > ObjectState::kOther) return kChangedLater;
    if (mask == 0) {
      object = Object(ObjectState::kOther, 0);
      return {};
    }
    const auto is = [&](std::uint64_t keys) { return (mask & keys) == keys; };
    if (is(bit(kAction))) return add_entry(fields, mask, object);
    if (is(bit(kFilename)) && (is(bit(kLine)) || is(bit(kName)))) return add_frame(fields, object);
    if (is(bit(kState) | bit(kSize))) return add_block(fields, mask, object);
    if (is(bit(kTotalSize))) return add_segment(fields, mask, object);
    if (is(bit(kStage))) {  // an annotation
      close(object, Object(ObjectState::kOther, 0));
      return {};
    }
    // The whole file, its settings, an old block's history, or a part of any dict.
    if (before == 0) {
      if (auto mistake = open(object)) return mistake;
    }
    std::vector<PickleValue>& held = open_[object.index()];
    held.clear();
    for (std::uint32_t key = 0; key < kKeys; ++key) {
      if ((mask >> key & 1) == 0) continue;
      held.push_back({Kind::kText, key});
      held.push_back(fields[key]);
    }
    return {};
  }

  // What was read, with `value` as the whole of it.
  Result<Snapshot> finish(PickleValue value) {
    Mistake mistake = finish_whole(value);
    if (mistake) return Error{Errc::kInvalidArgument, {}, *mistake};
    snapshot_.schema = schema();
    snapshot_.texts = std::move(constants_.texts);
    return std::move(snapshot_);
  }

 private:
  PickleValue new_object(Kind kind) {
    // What is above the limit is said at the next call that can.
    objects_.push_back({});
    return {kind, static_cast<std::int64_t>(objects_.size() - 1)};
  }

  Mistake open(Object& object) {
    std::size_t index = open_.size();
    if (!spare_.empty()) {
      index = spare_.back();
      spare_.pop_back();
    } else if (index == kMaxOpen) {
      return "too large: more than 2^24 lists and dicts that are no part of a trace";
    } else {
      open_.emplace_back();
    }
    object = Object(ObjectState::kOpen, index);
    return {};
  }
  // The items are no longer needed.
  void close(Object& object, Object becomes) {
    if (object.state() == ObjectState::kOpen) {
      std::vector<PickleValue>& held = open_[object.index()];
      held.clear();
      if (held.capacity() > 4096) held.shrink_to_fit();
      spare_.push_back(object.index());
    }
    object = becomes;
  }

  // --- values of a dict ---

  Mistake wrong_type(const char* what, Key key, PickleValue value, const char* wanted) const {
    return std::string(what) + ": " + quoted(key) + " is " + to_string(value.kind()) + ", not " +
           wanted;
  }

  Mistake get_int(const char* what, const Fields& fields, Key key, std::int64_t most,
                  std::int64_t& out) const {
    const auto n = constants_.as_int(fields[key]);
    if (!n) return wrong_type(what, key, fields[key], "an int");
    if (*n < 0 || *n > most) {
      return std::string(what) + ": " + quoted(key) + " is " + std::to_string(*n) +
             "; it must be from 0 to " + std::to_string(most);
    }
    out = *n;
    return {};
  }
  Mistake get_size(const char* what, const Fields& fields, Key key, std::uint64_t& out) const {
    std::int64_t n = 0;
    Mistake mistake = get_int(what, fields, key, Snapshot::kMaxSize, n);
    out = static_cast<std::uint64_t>(n);
    return mistake;
  }
  Mistake get_address(const char* what, const Fields& fields, Key key, std::uint64_t& out) const {
    std::int64_t n = 0;
    // So far from the end that no sum of an address and a size overflows.
    Mistake mistake = get_int(what, fields, key, std::int64_t{1} << 62, n);
    out = static_cast<std::uint64_t>(n);
    return mistake;
  }
  Mistake get_text(const char* what, const Fields& fields, Key key, std::uint32_t& out) const {
    const PickleValue value = fields[key];
    out = empty_text_;
    if (value.is(Kind::kText)) {
      out = value.text();
    } else if (!value.is(Kind::kNone) && !value.is(Kind::kUnset)) {
      return wrong_type(what, key, value, "a str");
    }
    return {};
  }
  Mistake get_stream(const char* what, const Fields& fields, std::uint16_t& out) {
    std::int64_t stream = 0;
    if (!fields[kStream].is(Kind::kUnset)) {
      const auto n = constants_.as_int(fields[kStream]);
      if (!n) return wrong_type(what, kStream, fields[kStream], "an int");
      stream = *n;
    }
    if (stream == last_stream_ && !snapshot_.streams.empty()) {
      out = last_stream_index_;
      return {};
    }
    const auto [found, added] =
        stream_numbers_.try_emplace(stream, static_cast<std::uint16_t>(snapshot_.streams.size()));
    if (added) {
      if (snapshot_.streams.size() == Snapshot::kMaxStreams) return "more than 32767 streams";
      snapshot_.streams.push_back(stream);
    }
    last_stream_ = stream;
    out = last_stream_index_ = found->second;
    return {};
  }

  // The items of a list, or nothing when it is no list or its items are gone.
  std::optional<std::span<const PickleValue>> items_of(PickleValue value) const {
    if (!value.is(Kind::kList)) return {};
    const Object object = objects_[value.number()];
    if (object.state() == ObjectState::kEmpty) return std::span<const PickleValue>{};
    if (object.state() != ObjectState::kOpen) return {};
    return open_[object.index()];
  }

  bool is_taken(PickleValue value) const {
    return (value.is(Kind::kList) || value.is(Kind::kDict)) &&
           objects_[value.number()].state() == ObjectState::kTaken;
  }

  Mistake get_stack(const char* what, PickleValue value, std::uint32_t& out) {
    out = 0;
    if (value.is(Kind::kUnset) || value.is(Kind::kNone)) return {};
    if (!value.is(Kind::kList)) return wrong_type(what, kFrames, value, "a list");
    Object& object = objects_[value.number()];
    if (object.state() == ObjectState::kEmpty) return {};
    if (object.state() == ObjectState::kStack) {
      out = static_cast<std::uint32_t>(object.index());
      return {};
    }
    frames_.clear();
    const auto items = items_of(value);
    if (!items) return std::string(what) + ": 'frames' is not a list of frames";
    for (const PickleValue item : *items) {
      const Object frame = item.is(Kind::kDict) ? objects_[item.number()] : Object{};
      if (frame.state() != ObjectState::kFrame) {
        return std::string(what) + ": 'frames' has " + to_string(item.kind()) +
               " that is no frame (a dict with 'filename', 'line' and 'name')";
      }
      frames_.push_back(static_cast<std::uint32_t>(frame.index()));
    }
    out = snapshot_.stacks.stack(frames_);
    close(object, Object(ObjectState::kStack, out));
    has_frames_ = true;
    return {};
  }

  // --- dicts that are complete ---

  Mistake add_frame(const Fields& fields, Object& object) {
    SnapshotFrame frame;
    std::int64_t line = 0;
    if (auto mistake = get_text("a frame", fields, kFilename, frame.file)) return mistake;
    if (auto mistake = get_text("a frame", fields, kName, frame.function)) return mistake;
    if (!fields[kLine].is(Kind::kUnset) && !fields[kLine].is(Kind::kNone)) {
      const auto n = constants_.as_int(fields[kLine]);
      if (!n) return wrong_type("a frame", kLine, fields[kLine], "an int");
      line = std::clamp<std::int64_t>(*n, 0, INT32_MAX);  // frames without source have -1 in places
    }
    frame.line = static_cast<std::uint32_t>(line);
    close(object, Object(ObjectState::kFrame, snapshot_.stacks.frame(frame)));
    return {};
  }

  Mistake add_entry(const Fields& fields, std::uint64_t mask, Object& object) {
    constexpr char kWhat[] = "a trace entry";
    SnapshotEntries& entries = snapshot_.entries;
    if (entries.rows() == kMaxRows) return "too large: more than 2^28 trace entries";
    if (!fields[kAction].is(Kind::kText)) {
      return wrong_type(kWhat, kAction, fields[kAction], "a str");
    }
    const auto found = std::find(actions_.begin(), actions_.end(), fields[kAction].text());
    const auto action = static_cast<TraceAction>(found - actions_.begin());
    static_assert(static_cast<std::size_t>(TraceAction::kOther) == kActionTexts.size());

    std::uint64_t addr = 0, size = 0;
    std::int64_t time = -1;
    std::uint16_t stream = 0;
    std::uint32_t stack = 0, metadata = 0;
    if (action == TraceAction::kOom) {
      addr = SnapshotEntries::kNoNumber;
      if (!fields[kDeviceFree].is(Kind::kUnset)) {
        if (auto mistake = get_size(kWhat, fields, kDeviceFree, addr)) return mistake;
      }
      // What is asked for can be anything.
      const auto asked = constants_.as_int(fields[kSize]);
      if (!asked && !fields[kSize].is(Kind::kHugeInt)) {
        return wrong_type(kWhat, kSize, fields[kSize], "an int");
      }
      size = static_cast<std::uint64_t>(std::max<std::int64_t>(asked.value_or(INT64_MAX), 0));
    } else if (action < TraceAction::kSnapshot) {
      if (auto mistake = get_address(kWhat, fields, kAddr, addr)) return mistake;
      if (auto mistake = get_size(kWhat, fields, kSize, size)) return mistake;
    }
    if (!fields[kTimeUs].is(Kind::kUnset)) {
      if (auto mistake = get_int(kWhat, fields, kTimeUs, Snapshot::kMaxTime, time)) return mistake;
    }
    if (auto mistake = get_stream(kWhat, fields, stream)) return mistake;
    if (auto mistake = get_stack(kWhat, fields[kFrames], stack)) return mistake;
    if (auto mistake = get_text(kWhat, fields, kUserMetadata, metadata)) return mistake;
    entry_keys_ |= mask;
    close(object, Object(ObjectState::kEntry, entries.rows()));
    entries.action.push_back(action);
    entries.addr.push_back(addr);
    entries.size.push_back(size);
    entries.time_us.push_back(time);
    entries.stream.push_back(stream);
    entries.stack.push_back(stack);
    entries.metadata.push_back(metadata);
    return {};
  }

  Mistake add_block(const Fields& fields, std::uint64_t mask, Object& object) {
    constexpr char kWhat[] = "a block";
    if (snapshot_.blocks.size() == kMaxRows) return "too large: more than 2^28 blocks";
    SnapshotBlock block;
    if (auto mistake = get_size(kWhat, fields, kSize, block.size)) return mistake;
    if (!fields[kState].is(Kind::kText)) return wrong_type(kWhat, kState, fields[kState], "a str");
    // The third state has had two names: active_pending_free and active_awaiting_free.
    const std::uint32_t state = fields[kState].text();
    block.state = state == live_   ? BlockState::kLive
                  : state == free_ ? BlockState::kFree
                                   : BlockState::kPending;
    block.address = kNoAddress;
    if (!fields[kAddress].is(Kind::kUnset)) {
      if (auto mistake = get_address(kWhat, fields, kAddress, block.address)) return mistake;
    }
    block.requested = block.state == BlockState::kFree ? 0 : block.size;
    if (!fields[kRequestedSize].is(Kind::kUnset)) {
      if (auto mistake = get_size(kWhat, fields, kRequestedSize, block.requested)) return mistake;
    }
    if (auto mistake = get_stack(kWhat, fields[kFrames], block.stack)) return mistake;
    if ((mask & bit(kHistory)) != 0) {
      if (auto mistake = take_history(fields[kHistory], mask, block)) return mistake;
    }
    close(object, Object(ObjectState::kBlock, snapshot_.blocks.size()));
    snapshot_.blocks.push_back(block);
    return {};
  }

  // torch 2.0: what the block was last used for is the first item of its history.
  Mistake take_history(PickleValue value, std::uint64_t block_keys, SnapshotBlock& block) {
    constexpr char kWhat[] = "a block's history";
    has_history_ = true;
    const auto items = items_of(value);
    if (!items) return wrong_type("a block", kHistory, value, "a list");
    if (items->empty()) return {};
    const PickleValue first = items->front();
    if (!first.is(Kind::kDict)) return wrong_type("a block", kHistory, first, "a dict");
    Fields fields;
    if (!fields_of(first, fields))
      return std::string(kWhat) + ": its first item has no 'real_size'";
    if ((block_keys & bit(kRequestedSize)) == 0 && block.state != BlockState::kFree) {
      if (auto mistake = get_size(kWhat, fields, kRealSize, block.requested)) return mistake;
    }
    if (block.stack != 0) return {};
    return get_stack(kWhat, fields[kFrames], block.stack);
  }

  bool fields_of(PickleValue dict, Fields& fields) const {
    const Object object = objects_[dict.number()];
    if (object.state() != ObjectState::kOpen) return false;
    const std::vector<PickleValue>& pairs = open_[object.index()];
    for (std::size_t i = 0; i < pairs.size(); i += 2) fields[pairs[i].text()] = pairs[i + 1];
    return true;
  }

  Mistake add_segment(const Fields& fields, std::uint64_t mask, Object& object) {
    constexpr char kWhat[] = "a segment";
    SnapshotSegment segment;
    std::int64_t device = 0;
    if (!fields[kDevice].is(Kind::kUnset)) {
      if (auto mistake = get_int(kWhat, fields, kDevice, Snapshot::kMaxDevices - 1, device)) {
        return mistake;
      }
    }
    segment.device = static_cast<int>(device);
    if (auto mistake = get_address(kWhat, fields, kAddress, segment.address)) return mistake;
    if (auto mistake = get_size(kWhat, fields, kTotalSize, segment.size)) return mistake;
    if (auto mistake = get_stream(kWhat, fields, segment.stream)) return mistake;
    segment.expandable = fields[kIsExpandable].is(Kind::kBool) && fields[kIsExpandable].number();
    segment.private_pool =
        fields[kSegmentPoolId].is(Kind::kTuple) && fields[kSegmentPoolId].number();
    if (auto mistake = take_blocks(fields[kBlocks], segment)) return mistake;
    segment_keys_ |= mask;
    close(object, Object(ObjectState::kSegment, segments_.size()));
    segments_.push_back(segment);
    return {};
  }

  Mistake take_blocks(PickleValue value, SnapshotSegment& segment) {
    segment.first_block = snapshot_.blocks.size();
    if (value.is(Kind::kUnset) || value.is(Kind::kNone)) return {};
    const auto items = items_of(value);
    if (!items && is_taken(value)) return "a segment: its 'blocks' are another segment's too";
    if (!items) return wrong_type("a segment", kBlocks, value, "a list");
    rows_.clear();
    for (const PickleValue item : *items) {
      const Object block = item.is(Kind::kDict) ? objects_[item.number()] : Object{};
      if (block.state() != ObjectState::kBlock) {
        return std::string("a segment: 'blocks' has ") + to_string(item.kind()) +
               " that is no block (a dict with 'size' and 'state')";
      }
      rows_.push_back(block.index());
    }
    segment.first_block = in_a_row(rows_, [&](std::size_t row) {
      snapshot_.blocks.push_back(SnapshotBlock(snapshot_.blocks[row]));
      return snapshot_.blocks.size() - 1;
    });
    segment.blocks = rows_.size();
    if (!rows_.empty()) close(objects_[value.number()], Object(ObjectState::kTaken, 0));
    // Before 2.1, a block's place was told by those before it only.
    std::uint64_t address = segment.address;
    for (std::size_t i = 0; i < segment.blocks; ++i) {
      SnapshotBlock& block = snapshot_.blocks[segment.first_block + i];
      if (block.address == kNoAddress) block.address = address;
      address = std::min(block.address + block.size, kNoAddress - 1);
    }
    return {};
  }

  // The first of `rows`, which must follow each other: as they do, unless the file names one twice or
  // in another order than it wrote them. Then `copy` makes new ones at the end of the table.
  template <class Copy>
  static std::size_t in_a_row(const std::vector<std::size_t>& rows, Copy copy) {
    if (rows.empty()) return 0;
    bool follow = true;
    for (std::size_t i = 1; i < rows.size(); ++i) follow = follow && rows[i] == rows[i - 1] + 1;
    if (follow) return rows.front();
    const std::size_t first = copy(rows.front());
    for (std::size_t i = 1; i < rows.size(); ++i) copy(rows[i]);
    return first;
  }

  // --- the whole ---

  Mistake finish_whole(PickleValue value) {
    if (value.is(Kind::kList)) {
      bare_list_ = true;
      return take_segments(value);
    }
    Fields fields;
    constexpr char kNone[] =
        "not a memory snapshot: it has neither 'segments' nor 'device_traces'; expected what "
        "torch.cuda.memory._dump_snapshot() writes";
    if (!value.is(Kind::kDict)) {
      return std::string("not a memory snapshot: it is ") + to_string(value.kind()) +
             ", not a dict; expected what torch.cuda.memory._dump_snapshot() writes";
    }
    if (!fields_of(value, fields)) return kNone;
    const bool segments = !fields[kSegments].is(Kind::kUnset);
    const bool traces = !fields[kDeviceTraces].is(Kind::kUnset);
    if (!segments && !traces) return kNone;
    whole_ = fields;
    if (segments) {
      if (auto mistake = take_segments(fields[kSegments])) return mistake;
    }
    if (traces) {
      if (auto mistake = take_traces(fields[kDeviceTraces])) return mistake;
    }
    if (fields[kAllocatorSettings].is(Kind::kDict)) {
      Fields settings;
      if (fields_of(fields[kAllocatorSettings], settings) &&
          settings[kOverflowed].is(Kind::kBool)) {
        snapshot_.overflowed = settings[kOverflowed].number() != 0;
      }
    }
    return {};
  }

  Mistake take_segments(PickleValue value) {
    const auto items = items_of(value);
    if (!items) {
      return std::string("'segments' is ") + to_string(value.kind()) + ", not a list of segments";
    }
    snapshot_.has_segments = true;
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < items->size(); ++i) {
      const PickleValue item = (*items)[i];
      const Object segment = item.is(Kind::kDict) ? objects_[item.number()] : Object{};
      if (is_taken(item)) return "segments[" + std::to_string(i) + "] is there twice";
      if (segment.state() != ObjectState::kSegment) {
        return "segments[" + std::to_string(i) + "] is " + to_string(item.kind()) +
               " that is no segment (a dict with 'address' and 'total_size'); " +
               "expected what torch.cuda.memory._dump_snapshot() writes";
      }
      snapshot_.segments.push_back(segments_[segment.index()]);
      objects_[item.number()] = Object(ObjectState::kTaken, 0);
      sum += snapshot_.segments.back().size;
      if (sum > 16 * Snapshot::kMaxSize) return "the segments' sizes add up to more than 4 PiB";
    }
    return {};
  }

  Mistake take_traces(PickleValue value) {
    const auto devices = items_of(value);
    if (!devices) {
      return std::string("'device_traces' is ") + to_string(value.kind()) + ", not a list of lists";
    }
    if (devices->size() > static_cast<std::size_t>(Snapshot::kMaxDevices)) {
      return "'device_traces' has " + std::to_string(devices->size()) + " devices; at most " +
             std::to_string(Snapshot::kMaxDevices) + " are supported";
    }
    for (std::size_t d = 0; d < devices->size(); ++d) {
      const std::string where = "device_traces[" + std::to_string(d) + "]";
      const auto items = items_of((*devices)[d]);
      if (is_taken((*devices)[d])) return where + " is another device's too";
      if (!items) {
        return where + " is " + to_string((*devices)[d].kind()) + ", not a list of trace entries";
      }
      rows_.clear();
      for (std::size_t i = 0; i < items->size(); ++i) {
        const PickleValue item = (*items)[i];
        const Object entry = item.is(Kind::kDict) ? objects_[item.number()] : Object{};
        if (entry.state() != ObjectState::kEntry) {
          return where + "[" + std::to_string(i) + "] is " + to_string(item.kind()) +
                 " that is no trace entry (a dict with 'action')";
        }
        rows_.push_back(entry.index());
      }
      const std::size_t first = in_a_row(rows_, [&](std::size_t row) {
        snapshot_.entries.append(snapshot_.entries, row);
        return snapshot_.entries.rows() - 1;
      });
      snapshot_.devices.push_back({first, rows_.size()});
      if (!rows_.empty()) close(objects_[(*devices)[d].number()], Object(ObjectState::kTaken, 0));
    }
    return {};
  }

  std::string schema() const {
    if (bare_list_) return "segments only (torch.cuda.memory.memory_snapshot())";
    std::string text = has_history_ ? "torch 2.0" : "torch 2.1 or newer";
    const char* between = ": ";
    const auto add = [&](const char* part) {
      text += std::string(between) + part;
      between = ", ";
    };
    if (has_history_) add("blocks with history");
    add(whole_[kSegments].is(Kind::kUnset) ? "no segments" : "segments");
    add(whole_[kDeviceTraces].is(Kind::kUnset) ? "no traces" : "traces");
    if ((entry_keys_ & bit(kTimeUs)) != 0) add("times");
    if (has_frames_) add("frames");
    if ((segment_keys_ & bit(kIsExpandable)) != 0) add("expandable segments told");
    if (!whole_[kAllocatorSettings].is(Kind::kUnset)) add("settings");
    if (!whole_[kExternalAnnotations].is(Kind::kUnset)) add("annotations");
    if ((entry_keys_ & bit(kCompileContext)) != 0) add("compile contexts");
    if ((entry_keys_ & bit(kUserMetadata)) != 0) add("user metadata");
    if ((entry_keys_ & bit(kPoolId)) != 0) add("pools of entries");
    if (snapshot_.overflowed) add("overflow told");
    return text;
  }

  static constexpr std::uint64_t kNoAddress = UINT64_MAX;

  PickleConstants constants_;
  Snapshot snapshot_;
  std::vector<SnapshotSegment> segments_;  // in the order of the file

  PagedVector<Object> objects_;
  std::vector<std::vector<PickleValue>> open_;
  std::vector<std::size_t> spare_;  // of open_

  std::vector<std::uint32_t> actions_;  // text numbers, by TraceAction
  std::uint32_t live_ = 0, free_ = 0, empty_text_ = 0;
  std::unordered_map<std::int64_t, std::uint16_t> stream_numbers_;
  std::int64_t last_stream_ = 0;
  std::uint16_t last_stream_index_ = 0;

  std::vector<std::uint32_t> frames_;  // the last two: kept for their capacity
  std::vector<std::size_t> rows_;

  Fields whole_;
  std::uint64_t entry_keys_ = 0, segment_keys_ = 0;
  bool has_frames_ = false, has_history_ = false, bare_list_ = false;
};

}  // namespace

std::size_t StackTable::Hash::operator()(const SnapshotFrame& frame) const {
  std::uint64_t h = (std::uint64_t{frame.file} << 32 | frame.function) * 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 29 ^ frame.line) * 0xbf58476d1ce4e5b9u;
  return h ^ h >> 32;
}

std::uint32_t StackTable::frame(const SnapshotFrame& frame) {
  const auto [found, added] =
      frame_numbers_.try_emplace(frame, static_cast<std::uint32_t>(frames_.size()));
  if (added) frames_.push_back(frame);
  return found->second;
}

std::uint32_t StackTable::stack(std::span<const std::uint32_t> frames) {
  std::uint64_t hash = frames.size();
  for (const std::uint32_t frame : frames) {
    hash = (hash ^ frame) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  const auto [begin, end] = stack_numbers_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    if (std::ranges::equal((*this)[it->second], frames)) return it->second;
  }
  const auto number = static_cast<std::uint32_t>(size());
  frames_of_stacks_.insert(frames_of_stacks_.end(), frames.begin(), frames.end());
  ends_.push_back(frames_of_stacks_.size());
  stack_numbers_.emplace(hash, number);
  return number;
}

void SnapshotEntries::append(const SnapshotEntries& from, std::size_t row) {
  // By value: `from` may be this.
  action.push_back(TraceAction(from.action[row]));
  addr.push_back(std::uint64_t(from.addr[row]));
  size.push_back(std::uint64_t(from.size[row]));
  time_us.push_back(std::int64_t(from.time_us[row]));
  stream.push_back(std::uint16_t(from.stream[row]));
  stack.push_back(std::uint32_t(from.stack[row]));
  metadata.push_back(std::uint32_t(from.metadata[row]));
}

Result<Snapshot> read_snapshot(PickleInput& input, const ReadProgress& progress) {
  SnapshotBuilder builder;
  const auto whole = read_pickle(input, builder.constants(), builder, progress);
  if (!whole.ok()) return whole.error();
  return builder.finish(whole.value());
}

Result<Snapshot> read_snapshot(const std::string& path, const ReadProgress& progress) {
  auto input = PickleInput::open(path);
  if (!input.ok()) return input.error();
  PickleInput opened = std::move(input).take();
  return read_snapshot(opened, progress);
}

}  // namespace gpumemx
