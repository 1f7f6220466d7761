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

PageTable::PageTable(DeviceAddr base, Bytes size)
    : base_(base), granules_(size.n / kGranule.n), blocks_(zeroed<std::uint32_t>(granules_)) {
  std::size_t bits = granules_;
  for (auto& level : begins_) {
    level = zeroed<std::uint64_t>(words(bits));
    bits = words(bits);
  }
}

void PageTable::set_block(DeviceAddr at, std::uint32_t block_id) {
  std::size_t bit = granule(at);
  // Whoever finds the number without a lock finds the record that was written before.
  std::atomic_ref(blocks_[bit]).store(block_id, std::memory_order_release);
  for (auto& level : begins_) {
    std::uint64_t& word = level[bit / 64];
    const bool was_empty = word == 0;
    word |= 1ull << (bit % 64);
    if (!was_empty) break;
    bit /= 64;
  }
}

void PageTable::clear_block(DeviceAddr at) {
  std::size_t bit = granule(at);
  std::atomic_ref(blocks_[bit]).store(0, std::memory_order_relaxed);
  for (auto& level : begins_) {
    std::uint64_t& word = level[bit / 64];
    word &= ~(1ull << (bit % 64));
    if (word != 0) break;
    bit /= 64;
  }
}

std::uint32_t PageTable::last_block_at_or_before(DeviceAddr at) const {
  std::size_t bit = granule(at);
  // Up, to the first level with a set bit at or below; then down, to the highest bit of each word.
  for (int level = 0; level < kLevels; ++level) {
    std::size_t word = bit / 64;
    std::uint64_t upto = begins_[level][word] & (~0ull >> (63 - bit % 64));
    if (level == kLevels - 1) {
      while (upto == 0 && word > 0) upto = begins_[level][--word];
    }
    if (upto != 0) {
      bit = word * 64 + static_cast<std::size_t>(63 - std::countl_zero(upto));
      while (level-- > 0) {
        bit = bit * 64 + static_cast<std::size_t>(63 - std::countl_zero(begins_[level][bit]));
      }
      return blocks_[bit];
    }
    if (word == 0) return 0;
    bit = word - 1;
  }
  return 0;
}

PageTable* TablePool::take(DeviceAddr base) {
  if (spare_.empty()) {
    tables_.push_back(std::make_unique<PageTable>(base, kSlot));
    return tables_.back().get();
  }
  PageTable* table = spare_.back();
  spare_.pop_back();
  table->move_to(base);
  return table;
}

Region::Region(AddrRange addresses, Heap* owner, TableSlot* slots, TablePool* pool)
    : range(addresses),
      heap(owner),
      mapped_end(range.begin),
      pages(zeroed<Mapping*>(range.size.n / kPage.n)),
      slots_(slots),
      pool_(pool) {}

Region::Region(AddrRange addresses, Heap* owner)
    : range(addresses),
      heap(owner),
      mapped_end(range.end()),
      plain(true),
      pages(zeroed<Mapping*>((range.size.n + kPage.n - 1) / kPage.n)) {}

PageTable& Region::table(DeviceAddr a) {
  const std::size_t i = index(a);
  if (PageTable* table = table_at(i)) return *table;
  if (plain) {
    own_table_ = std::make_unique<PageTable>(range.begin, round_up(range.size, kGranule));
    return *own_table_;
  }
  PageTable* table = pool_->take(range.begin + kSlot * i);
  slots_[i].store(table, std::memory_order_release);
  return *table;
}

void Region::drop_tables() {
  for (std::size_t i = 0; i < range.size.n / kSlot.n; ++i) {
    PageTable* table = slots_[i].exchange(nullptr);
    if (table != nullptr) pool_->give_back(table);
  }
}

Block* Region::block_covering(DeviceAddr a, const Slab<Block>& blocks) const {
  for (std::size_t i = index(a) + 1; i-- > 0;) {
    const PageTable* table = table_at(i);
    if (table == nullptr) continue;
    const DeviceAddr slot_last = range.begin + kSlot * (i + 1) - kGranule;
    const DeviceAddr from = plain || a < slot_last ? a : slot_last;
    if (const std::uint32_t id = table->last_block_at_or_before(from); id != 0) {
      return blocks.at(id);
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
      table_slots_ = std::make_unique<TableSlot[]>(slots_.size());
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
  auto region = std::make_unique<Region>(addresses, heap, &table_slots_[*first], &tables_);
  region->serial = ++last_serial_;
  for (std::size_t i = 0; i < need; ++i) slots_[*first + i] = region.get();
  next_fit_ = *first + need;
  regions_.push_back(std::move(region));
  return regions_.back().get();
}

Region* Arena::add_plain(AddrRange range, Heap* heap) {
  auto region = std::make_unique<Region>(range, heap);
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
  region->drop_tables();
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

Block* Arena::find(DeviceAddr a, const Slab<Block>& blocks) const {
  if (a.n % kGranule.n != 0 && range_.contains(a)) return nullptr;
  const Region* region = region_of(a);
  if (region == nullptr || (a - region->range.begin).n % kGranule.n != 0) return nullptr;
  const PageTable* table = region->table_if_any(a);
  const std::uint32_t id = table == nullptr ? 0 : table->block_at(a);
  return id == 0 ? nullptr : blocks.at(id);
}

}  // namespace gpumemx
