// SPDX-License-Identifier: BSD-3-Clause
#include "core/arena.hpp"

#include <algorithm>
#include <bit>

#include "base/check.hpp"

namespace gpumemx {

namespace {

std::size_t words(std::size_t bits) { return (bits + 63) / 64; }

}  // namespace

const char* to_string(BlockState state) {
  switch (state) {
    case BlockState::kVoid: return "void";
    case BlockState::kReady: return "ready";
    case BlockState::kFilling: return "filling";
    case BlockState::kLive: return "live";
    case BlockState::kPending: return "pending";
  }
  return "unknown";
}

BlockBegins::BlockBegins(DeviceAddr base, Bytes size) : base_(base) {
  std::size_t bits = size.n / kGranule.n;
  for (auto& level : levels_) {
    level = zeroed<std::uint64_t>(words(bits));
    bits = words(bits);
  }
}

void BlockBegins::set(DeviceAddr at) {
  std::size_t bit = granule(at);
  for (auto& level : levels_) {
    std::uint64_t& word = level[bit / 64];
    const bool was_empty = word == 0;
    word |= 1ull << (bit % 64);
    if (!was_empty) break;
    bit /= 64;
  }
}

void BlockBegins::clear(DeviceAddr at) {
  std::size_t bit = granule(at);
  for (auto& level : levels_) {
    std::uint64_t& word = level[bit / 64];
    word &= ~(1ull << (bit % 64));
    if (word != 0) break;
    bit /= 64;
  }
}

bool BlockBegins::has(DeviceAddr at) const {
  const std::size_t bit = granule(at);
  return (levels_[0][bit / 64] >> (bit % 64) & 1) != 0;
}

std::optional<DeviceAddr> BlockBegins::last_at_or_before(DeviceAddr at) const {
  std::size_t bit = granule(at);
  // Up, to the first level with a set bit at or below; then down, to the highest bit of each word.
  for (int level = 0; level < kLevels; ++level) {
    std::size_t word = bit / 64;
    std::uint64_t upto = levels_[level][word] & (~0ull >> (63 - bit % 64));
    if (level == kLevels - 1) {
      while (upto == 0 && word > 0) upto = levels_[level][--word];
    }
    if (upto != 0) {
      bit = word * 64 + static_cast<std::size_t>(63 - std::countl_zero(upto));
      while (level-- > 0) {
        bit = bit * 64 + static_cast<std::size_t>(63 - std::countl_zero(levels_[level][bit]));
      }
      return base_ + kGranule * bit;
    }
    if (word == 0) return std::nullopt;
    bit = word - 1;
  }
  return std::nullopt;
}

Region::Region(AddrRange addresses, Heap* owner, BlockMap& map, bool is_plain)
    : range(addresses),
      heap(owner),
      mapped_end(is_plain ? range.end() : range.begin),
      plain(is_plain),
      pages(zeroed<Mapping*>((range.size.n + kPage.n - 1) / kPage.n)),
      map_(map),
      begins_(is_plain ? 1 : range.size.n / kSlot.n) {}

void Region::make_begins(std::size_t slot) {
  const Bytes size = plain ? round_up(range.size, kGranule) : kSlot;
  begins_[slot] = std::make_unique<BlockBegins>(range.begin + kSlot * slot, size);
}

bool Region::has_begin(DeviceAddr a) const {
  const auto& begins = begins_[index(a)];
  return begins != nullptr && begins->has(a);
}

Block* Region::block_covering(DeviceAddr a, const Slab<Block>& blocks) const {
  for (std::size_t i = index(a) + 1; i-- > 0;) {
    if (begins_[i] == nullptr) continue;
    const DeviceAddr slot_last = range.begin + kSlot * (i + 1) - kGranule;
    const DeviceAddr from = plain || a < slot_last ? a : slot_last;
    if (const auto begin = begins_[i]->last_at_or_before(from)) {
      return map_.find(*begin, blocks);
    }
  }
  GPUMEMX_CHECK(false, "an address of a region belongs to no block");
  return nullptr;
}

Arena::Arena(DeviceDriver& driver, Bytes size) : driver_(driver) {
  for (Bytes want = round_up(size, kSlot); want >= kSlot; want = round_down({want.n / 2}, kSlot)) {
    const auto range = driver_.reserve(want, kSlot);
    if (range.ok()) {
      range_ = range.value();
      slots_.resize(range_.size.n / kSlot.n, nullptr);
      return;
    }
    if (range.error().code != Errc::kOutOfAddressSpace) return;
  }
}

Arena::~Arena() {
  if (range_.size.n != 0) (void)driver_.unreserve(range_);
}

Region* Arena::take(Bytes size, Heap* heap) {
  const std::size_t need = (size.n + kSlot.n - 1) / kSlot.n;
  if (need == 0 || need > slots_.size()) return nullptr;
  const auto search = [&](std::size_t from, std::size_t to) -> std::optional<std::size_t> {
    std::size_t run = 0;
    for (std::size_t i = from; i < to; ++i) {
      run = slots_[i] == nullptr ? run + 1 : 0;
      if (run == need) return i + 1 - need;
    }
    return std::nullopt;
  };
  auto first = search(next_fit_, slots_.size());
  if (!first) first = search(0, slots_.size());
  if (!first) return nullptr;

  const AddrRange addresses{range_.begin + kSlot * *first, kSlot * need};
  auto region = std::make_unique<Region>(addresses, heap, map_, /*plain=*/false);
  region->serial = ++last_serial_;
  for (std::size_t i = 0; i < need; ++i) slots_[*first + i] = region.get();
  next_fit_ = *first + need;
  regions_.push_back(std::move(region));
  return regions_.back().get();
}

Region* Arena::add_plain(AddrRange range, Heap* heap) {
  auto region = std::make_unique<Region>(range, heap, map_, /*plain=*/true);
  region->serial = ++last_serial_;
  Region* raw = region.get();
  plain_.emplace(range.begin.n, std::move(region));
  return raw;
}

void Arena::give_back(Region* region) {
  if (region->plain) {
    plain_.erase(region->range.begin.n);
    return;
  }
  const std::size_t first = (region->range.begin - range_.begin).n / kSlot.n;
  for (std::size_t i = 0; i < region->range.size.n / kSlot.n; ++i) slots_[first + i] = nullptr;
  std::erase_if(regions_, [&](const auto& r) { return r.get() == region; });
}

Region* Arena::region_of(DeviceAddr a) const {
  if (range_.contains(a)) return slots_[(a - range_.begin).n / kSlot.n];
  auto above = plain_.upper_bound(a.n);
  if (above == plain_.begin()) return nullptr;
  Region* region = std::prev(above)->second.get();
  return region->range.contains(a) ? region : nullptr;
}

}  // namespace gpumemx
