// SPDX-License-Identifier: BSD-3-Clause
#include "replay/torch_model.hpp"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/check.hpp"

namespace gpumemx {

namespace {

constexpr Bytes kGranule = 512_B;     // every split leaves at least this
constexpr Bytes kSmallLimit = 1_MiB;  // up to here: the pool of small blocks
constexpr Bytes kSmallSegment = 2_MiB;
constexpr Bytes kLargeSegmentBelow = 10_MiB;  // such requests share segments; others have their own
constexpr Bytes kOwnSegmentStep = 2_MiB;
constexpr Bytes kLargestRequest{std::uint64_t{1} << 60};
constexpr Bytes kNoLimit = 64_TiB;
// Of the H200 that the models were measured on.
constexpr Bytes kMeasuredDevice{150'110'011'392};

MemoryLimits in_full(MemoryLimits limits) {
  const Bytes lowest = limits.lowest();
  if (limits.device_total == Bytes{}) limits.device_total = std::max(kMeasuredDevice, lowest);
  for (Bytes* limit : {&limits.cap, &limits.device}) {
    if (*limit == Bytes{}) *limit = kNoLimit;
  }
  return limits;
}

}  // namespace

struct TorchModel::Block {
  DeviceAddr address;
  Bytes size;
  std::int16_t stream = 0;
  Pool* pool = nullptr;
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  std::optional<Bytes> page;  // of an expandable segment; none: a plain segment
  bool used = false;
  bool mapped = true;
  std::uint64_t freed_at = 0;  // the pool's searches until it came into the pool

  bool whole_segment() const { return before == nullptr && after == nullptr; }
};

struct TorchModel::Pool {
  struct BySize {
    using is_transparent = void;
    struct Key {
      std::int16_t stream;
      Bytes size;
    };
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
    }
    bool operator()(const Block* a, const Key& b) const {
      return std::tie(a->stream, a->size) < std::tie(b.stream, b.size);
    }
  };
  struct ByAddress {
    using is_transparent = void;
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->stream, a->address) < std::tie(b->stream, b->address);
    }
    bool operator()(const Block* a, std::int16_t stream) const { return a->stream < stream; }
  };

  bool small = false;
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;
  std::uint64_t searches = 0;
};

struct TorchModel::Request {
  Bytes size;     // rounded
  Bytes segment;  // that a new segment for it would have
  std::int16_t stream;
  Pool& pool;
};

TorchModel::TorchModel(const TorchOptions& options, const MemoryLimits& limits)
    : options_(options), limits_(in_full(limits)), capped_(limits.cap != Bytes{}), pools_(2) {
  pools_[0].small = true;
}

TorchModel::~TorchModel() = default;

// --- blocks

TorchModel::Block* TorchModel::new_block(DeviceAddr address, Bytes size, std::int16_t stream,
                                         Pool& pool) {
  if (spare_.empty()) {
    blocks_.emplace_back();
    spare_.push_back(&blocks_.back());
  }
  Block* block = spare_.back();
  spare_.pop_back();
  *block = Block{};
  block->address = address;
  block->size = size;
  block->stream = stream;
  block->pool = &pool;
  return block;
}

void TorchModel::drop_block(Block* block) { spare_.push_back(block); }

void TorchModel::insert_free(Block* block) {
  block->freed_at = block->pool->searches;
  block->pool->free.insert(block);
}

// Takes `neighbour` in where both are free, or both unmapped.
void TorchModel::merge_into(Block* block, Block* neighbour) {
  if (neighbour == nullptr || neighbour->used || neighbour->mapped != block->mapped) return;
  if (neighbour->mapped) {
    neighbour->pool->free.erase(neighbour);
  } else {
    neighbour->pool->unmapped.erase(neighbour);
  }
  if (neighbour == block->before) {
    block->address = neighbour->address;
    block->before = neighbour->before;
    if (block->before != nullptr) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after != nullptr) block->after->before = block;
  }
  block->size += neighbour->size;
  drop_block(neighbour);
}

void TorchModel::merge_with_neighbours(Block* block) {
  merge_into(block, block->before);
  merge_into(block, block->after);
}

// Cuts `size` off the front, as a block of its own that is returned; `block` is the rest.
TorchModel::Block* TorchModel::split_front(Block* block, Bytes size) {
  Block* front = new_block(block->address, size, block->stream, *block->pool);
  front->page = block->page;
  front->mapped = block->mapped;
  front->before = block->before;
  if (front->before != nullptr) front->before->after = front;
  front->after = block;
  block->before = front;
  block->address = block->address + size;
  block->size -= size;
  return front;
}

bool TorchModel::keeps_rest(const Block& block, Bytes size) const {
  const Bytes rest = block.size - size;
  if (block.pool->small || options_.expandable_segments) return rest >= kGranule;
  return size < options_.max_split_size && rest > kSmallLimit;
}

// --- a request, way by way

std::optional<BlockRef> TorchModel::allocate(Bytes size, std::int16_t stream) {
  if (size == Bytes{}) return BlockRef{0};
  if (size >= kLargestRequest) return std::nullopt;
  const Bytes rounded = options_.rounded(size);
  const bool small = rounded <= kSmallLimit;
  Bytes segment = round_up(rounded, kOwnSegmentStep);
  if (small) {
    segment = kSmallSegment;
  } else if (rounded < kLargeSegmentBelow) {
    segment = options_.large_segment_size;
  }
  const Request request{rounded, segment, stream, pools_[small ? 0 : 1]};

  Block* block = find_free(request);
  if (block != nullptr) {
    ++hits_;
  } else {
    ++misses_;
    collect_garbage();
    block = take_new(request);
    if (block == nullptr && release_oversize(request)) block = take_new(request);
    if (block == nullptr) {
      release_all_cached();
      ++retries_;
      block = take_new(request);
    }
    if (block == nullptr) return std::nullopt;
  }
  if (keeps_rest(*block, rounded)) {
    Block* rest = block;
    block = split_front(rest, rounded);
    insert_free(rest);
  }
  block->used = true;
  return reinterpret_cast<BlockRef>(block);
}

void TorchModel::free(BlockRef ref) {
  if (ref == 0) return;
  Block* block = reinterpret_cast<Block*>(ref);
  block->used = false;
  merge_with_neighbours(block);
  insert_free(block);
}

TorchModel::Block* TorchModel::find_free(const Request& request) {
  auto& free = request.pool.free;
  ++request.pool.searches;
  auto best = free.lower_bound(Pool::BySize::Key{request.stream, request.size});
  if (best == free.end() || (*best)->stream != request.stream) return nullptr;
  if ((*best)->page) {
    // A block counts with the unmapped addresses behind it, so that the one that could grow most is
    // kept. Only as long as each next one could grow less.
    const auto with_room = [](const Block* b) {
      return b->after != nullptr && !b->after->mapped ? b->size + b->after->size : b->size;
    };
    for (auto next = std::next(best); next != free.end() && (*next)->stream == request.stream &&
                                      with_room(*next) < with_room(*best);
         ++next) {
      best = next;
    }
  }
  Block* block = *best;
  const Bytes whole = options_.max_split_size;
  if (request.size < whole && block->size >= whole) return nullptr;
  if (request.size >= whole && block->size >= request.size + options_.max_non_split_rounding) {
    return nullptr;
  }
  free.erase(best);
  return block;
}

TorchModel::Block* TorchModel::take_new(const Request& request) {
  // Under a cap, expandable segments too need room for a whole segment, though they may map less.
  if (reserved_ + request.segment > limits_.cap) return nullptr;
  return options_.expandable_segments ? grow(request) : take_segment(request);
}

// With max_split_size: gives back the smallest cached block that a request of such a size would
// take, else of the largest as many as make up its size. False when that is not enough.
bool TorchModel::release_oversize(const Request& request) {
  if (options_.max_split_size == TorchOptions::kNoLimit) return false;
  auto& free = request.pool.free;
  const Bytes wanted = std::max(request.size, options_.max_split_size);
  auto at = free.lower_bound(Pool::BySize::Key{request.stream, wanted});
  if (at != free.end() && (*at)->stream == request.stream && !(*at)->page) {
    release_segment(*at);
    return true;
  }
  Bytes released;
  while (released < wanted && at != free.begin()) {
    Block* block = *std::prev(at);
    if (block->size < options_.max_split_size || block->stream != request.stream) break;
    if (block->page) {
      --at;
      continue;
    }
    released += block->size;
    release_segment(block);
  }
  return released >= wanted;
}

void TorchModel::release_all_cached() {
  for (Pool* pool : {&pools_[1], &pools_[0]}) {
    std::vector<Block*> expandable;  // to unmap changes the pool
    for (auto it = pool->free.begin(); it != pool->free.end();) {
      Block* block = *it++;
      if (block->page) {
        expandable.push_back(block);
      } else if (block->whole_segment()) {
        release_segment(block);
      }
    }
    for (Block* block : expandable) unmap(block);
  }
}

// Gives back whole segments that have been cached for longer than the average, until little enough
// is held. Blocks of expandable segments count towards the average, but stay.
void TorchModel::collect_garbage() {
  if (options_.garbage_collection_threshold <= 0 || !capped_) return;
  const Bytes threshold{static_cast<std::uint64_t>(options_.garbage_collection_threshold *
                                                   static_cast<double>(limits_.cap.n))};
  if (reserved_ <= threshold) return;
  const Bytes target = reserved_ - threshold;
  Pool& pool = pools_[1];
  const auto age = [&](const Block* block) { return pool.searches - block->freed_at; };
  std::uint64_t ages = 0;
  std::uint64_t count = 0;
  for (const Block* block : pool.free) {
    if (!block->whole_segment()) continue;
    ages += age(block);
    ++count;
  }
  Bytes released;
  bool progress = true;
  while (released < target && progress && count > 0) {
    const double average = static_cast<double>(ages) / static_cast<double>(count);
    progress = false;
    for (auto it = pool.free.begin(); it != pool.free.end();) {
      Block* block = *it++;
      if (!block->whole_segment() || block->page) continue;
      if (static_cast<double>(age(block)) < average) continue;
      progress = true;
      released += block->size;
      ages -= age(block);
      --count;
      release_segment(block);
    }
  }
}

// --- plain segments

TorchModel::Block* TorchModel::take_segment(const Request& request) {
  if (reserved_ + request.segment > limits_.device) return nullptr;
  const DeviceAddr address = addresses_.allocate(round_up(request.segment, kOwnSegmentStep));
  charge(DriverCall::kAllocate, request.segment);
  hold({address, request.segment}, request.stream);
  return new_block(address, request.segment, request.stream, request.pool);
}

void TorchModel::release_segment(Block* block) {
  const AddrRange range{block->address, block->size};
  addresses_.free({range.begin, round_up(range.size, kOwnSegmentStep)});
  charge(DriverCall::kFree, range.size);
  give_back(range, block->stream);
  block->pool->free.erase(block);
  drop_block(block);
}

// --- expandable segments

TorchModel::Block* TorchModel::grow(const Request& request) {
  Block* block = room_to_grow(request);
  if (!block->mapped && !map(block, std::min(block->size, request.size))) return nullptr;
  while (block->size < request.size) {
    Block* next = block->after;
    if (!map(next, std::min(request.size - block->size, next->size))) return nullptr;
    block = next;  // which took the one before it in
  }
  request.pool.free.erase(block);
  return block;
}

// The first block of the lowest run of free and unmapped addresses that is long enough. A free block
// counts only with unmapped addresses right behind it: else it would have been found before.
TorchModel::Block* TorchModel::room_to_grow(const Request& request) {
  Pool& pool = request.pool;
  const auto usable = [](const Block* b) { return b != nullptr && !b->used; };
  for (auto it = pool.unmapped.lower_bound(request.stream);
       it != pool.unmapped.end() && (*it)->stream == request.stream; ++it) {
    Block* first = usable((*it)->before) ? (*it)->before : *it;
    Bytes room;
    for (const Block* b = first; usable(b) && room < request.size; b = b->after) room += b->size;
    if (room >= request.size) return first;
  }
  const Bytes page = pool.small ? kSmallSegment : options_.large_segment_size;
  // 9/8 of the device: what is unmapped in the middle can be mapped at the end.
  const std::uint64_t total = limits_.device_total.n;
  const Bytes size = round_up(std::max(Bytes{total + total / 8}, request.size), page);
  // Pages count from the segment's begin, so that is a multiple of them: unmap() goes by addresses.
  next_segment_ = round_up({next_segment_ + 2 * size.n}, page).n;
  Block* block = new_block({next_segment_}, size, request.stream, pool);
  block->page = page;
  block->mapped = false;
  pool.unmapped.insert(block);
  return block;
}

// Maps the pages that the first `size` bytes of `block` need, and puts it among the free ones. False,
// and nothing changed, when the device has no memory for them.
bool TorchModel::map(Block* block, Bytes size) {
  const Bytes pages = round_up(size, *block->page);
  if (reserved_ + pages > limits_.device) return false;
  block->pool->unmapped.erase(block);
  if (pages < block->size) {
    Block* rest =
        new_block(block->address + pages, block->size - pages, block->stream, *block->pool);
    rest->page = block->page;
    rest->mapped = false;
    rest->before = block;
    rest->after = block->after;
    if (rest->after != nullptr) rest->after->before = rest;
    block->after = rest;
    block->size = pages;
    block->pool->unmapped.insert(rest);
  }
  block->mapped = true;
  for (Bytes done; done < pages; done += *block->page) {
    charge(DriverCall::kCreate, *block->page);
    charge(DriverCall::kMap, *block->page);
    charge(DriverCall::kSetAccess, *block->page);
  }
  hold({block->address, pages}, block->stream);
  merge_with_neighbours(block);
  insert_free(block);
  return true;
}

// Unmaps the pages that lie wholly in the free `block`; an expandable segment without any is dropped.
void TorchModel::unmap(Block* block) {
  const Bytes page = *block->page;
  const DeviceAddr end = block->address + block->size;
  const DeviceAddr first{round_up({block->address.n}, page).n};
  const DeviceAddr last{round_down({end.n}, page).n};
  if (first < last) {
    Pool& pool = *block->pool;
    pool.free.erase(block);
    if (block->address < first) insert_free(split_front(block, first - block->address));
    if (last < end) {
      Block* front = split_front(block, last - first);
      insert_free(block);
      block = front;
    }
    block->mapped = false;
    for (Bytes done; done < block->size; done += page) {
      charge(DriverCall::kUnmap, page);
      charge(DriverCall::kRelease, page);
    }
    give_back({block->address, block->size}, block->stream);
    merge_with_neighbours(block);
    pool.unmapped.insert(block);
  }
  if (block->whole_segment() && !block->mapped) {
    block->pool->unmapped.erase(block);
    drop_block(block);
  }
}

// --- figures

bool TorchModel::observe_segments(SegmentObserver observer) {
  observer_ = std::move(observer);
  return true;
}

void TorchModel::hold(AddrRange range, std::int16_t stream) {
  reserved_ += range.size;
  reserved_peak_ = std::max(reserved_peak_, reserved_);
  if (observer_) observer_({true, range, stream});
}

void TorchModel::give_back(AddrRange range, std::int16_t stream) {
  reserved_ -= range.size;
  if (observer_) observer_({false, range, stream});
}

void TorchModel::charge(DriverCall call, Bytes size) {
  meter_.charge(call, costs_.microseconds(call, size) * 1e-6, /*ok=*/true, {}, size);
}

PolicyFigures TorchModel::figures() const {
  PolicyFigures figures;
  figures.reserved = reserved_;
  figures.reserved_peak = reserved_peak_;
  figures.driver = meter_.figures();
  figures.retries = retries_;
  figures.paths.hits = hits_;
  figures.paths.misses = misses_;
  return figures;
}

}  // namespace gpumemx
