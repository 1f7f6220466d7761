// SPDX-License-Identifier: BSD-3-Clause
//
// Memory that others reach too: blocks that are shared with other processes, memory of theirs, and
// devices that are peers of this one.
//
// Nothing keeps a shared handle in its place but the block itself: handles under a block in use are
// never harvested, and torch frees a shared block only when every consumer has counted down (its
// CudaIPCSentData holds the block until then). What is added here: Block::shared, so that the
// memory of a shared block is not replaced when a neighbour is shared.
#include "core/sharing.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "base/check.hpp"
#include "core/allocator.hpp"

namespace gpumemx {

namespace {

// What a plan costs, in microseconds as measured (docs/design.md), and what memory is worth: a page
// that is mapped for nothing stays so for the life of the block.
constexpr double kExportUs = 1150;
constexpr double kReplaceUs = 120;  // create, map twice, set access twice, unmap
constexpr double kCopyPageUs = 1.1;
constexpr double kExtraPageUs = 300;
constexpr double kOffGridUs = 20e3;  // an end that others may stand on, and that is not on the grid
constexpr double kDisturbUs = 150e3;  // rather a hundred handles more
constexpr double kInTheWayUs = 10e6;  // a neighbour that only gpumemx could receive

constexpr int kChainSteps = 64;  // blocks that are looked at for what the shared ones beside need

constexpr int kHoldTries = 40;  // ten seconds in which the streams never come to rest

DeviceAddr page_of(DeviceAddr a) { return {a.n / kPage.n * kPage.n}; }

// The heap's usual handles, so that little has to be replaced.
std::uint32_t share_grid(HeapKind kind) {
  switch (kind) {
    case HeapKind::kSmall: return 1;
    case HeapKind::kRest: return 4;
    default: return 8;
  }
}

bool is_shared(const Block& block) { return block.state == BlockState::kLive && block.shared; }

// Whether a neighbour can have handles of one size between a border that is given and its far end.
// `pages`: of the handles, where it stands on one at that border; else 0.
bool is_met(const Demand& demand, std::uint32_t pages) {
  if (pages != 0 && demand.pages != 0 && pages != demand.pages) return false;
  const std::uint64_t size = std::max(pages, demand.pages);
  return size == 0 || (demand.from + size - 1) / size * size <= demand.to;
}

// One way to lay handles under a block: of `pages` each, with borders at `phase` and multiples beyond.
class Layout {
 public:
  Layout(const ShareSite& site, const std::vector<std::uint64_t>& begins, std::uint32_t pages,
         std::uint32_t phase)
      : site_(site), begins_(begins), pages_(pages), phase_(phase) {}

  // Nothing where it does not go, or costs more than `limit`. Sets `cost`.
  std::optional<UniformPlan> plan(double limit, double& cost) const {
    // In steps from a border before all parts.
    const std::uint64_t offset = (pages_ - phase_) % pages_;
    const auto below = [&](std::uint64_t page) { return (page + offset) / pages_ * pages_; };
    if (below(site_.begin) < offset) return std::nullopt;
    const std::uint64_t low = below(site_.begin) - offset;
    const std::uint64_t high = below(site_.end - 1) + pages_ - offset;
    if (high > begins_.back()) return std::nullopt;

    UniformPlan plan{pages_, 0, 0, {}};
    cost = cost_of_ends(low, high, plan);
    if (cost >= limit) return std::nullopt;
    // What lies right already stays, as far as it goes on from either end.
    const auto stays = [&](std::size_t i) {
      const BackingPart& part = site_.parts[i];
      if (part.is_void || part.pages != pages_) return false;
      if (!part.is_exported) cost += kExportUs;
      return true;
    };
    std::uint64_t from = low;
    std::size_t first = part_at(low);
    while (from < high && begins_[first] == from && stays(first)) {
      ++first;
      from += pages_;
    }
    if (from == high) return plan;
    std::uint64_t to = high;
    std::size_t last = part_at(high - 1) + 1;  // behind the last that is replaced
    while (begins_[last] == to && stays(last - 1)) {
      --last;
      to -= pages_;
    }

    plan.keep_front = first;
    plan.keep_back = site_.parts.size() - last;
    for (std::size_t i = first; i < last; ++i) {
      const BackingPart& part = site_.parts[i];
      if (part.fixed) return std::nullopt;
      plan.disturbs_others = plan.disturbs_others || part.has_others;
      cost += (part.is_void ? kExtraPageUs : kCopyPageUs) * part.pages;
    }
    if (plan.disturbs_others) cost += kDisturbUs;
    const double count = static_cast<double>((to - from) / pages_);
    if (cost + count * kExportUs >= limit) return std::nullopt;
    const auto create = [&](std::uint64_t pages, double us) {
      plan.created.push_back(static_cast<std::uint32_t>(pages));
      cost += us;
    };
    // What others have of the handles that go, on the grid as far as it is.
    const auto fill = [&](std::uint64_t begin, std::uint64_t end) {
      while (begin < end) {
        const std::uint64_t step = site_.grid - (site_.origin + begin) % site_.grid;
        create(std::min(step, end - begin), kReplaceUs);
        begin += std::min(step, end - begin);
      }
    };
    fill(begins_[first], from);
    for (std::uint64_t page = from; page < to; page += pages_) {
      create(pages_, kExportUs + kReplaceUs);
    }
    fill(to, begins_[last]);
    if (cost >= limit) return std::nullopt;
    return plan;
  }

 private:
  // The part that covers a page.
  std::size_t part_at(std::uint64_t page) const {
    const auto above = std::upper_bound(begins_.begin(), begins_.end(), page);
    return static_cast<std::size_t>(above - begins_.begin()) - 1;
  }

  double cost_of_ends(std::uint64_t low, std::uint64_t high, UniformPlan& plan) const {
    double cost = 0;
    const bool on_grid = pages_ == site_.grid && (site_.origin + low) % site_.grid == 0;
    const auto look = [&](std::uint64_t distance, bool is_filled,
                          const std::vector<Neighbour>& neighbours) {
      if (!on_grid && (distance > 0 || !is_filled)) cost += kOffGridUs;
      if (distance >= neighbours.size()) return;
      const Neighbour& neighbour = neighbours[distance];
      if (!neighbour.demand || is_met(*neighbour.demand, neighbour.is_across ? pages_ : 0)) return;
      plan.in_the_way = true;
      cost += kInTheWayUs;
    };
    look(site_.begin - low, site_.fills_first, site_.before);
    look(high - site_.end, site_.fills_last, site_.after);
    return cost;
  }

  const ShareSite& site_;
  const std::vector<std::uint64_t>& begins_;  // of the parts, and where the last ends
  const std::uint32_t pages_;
  const std::uint32_t phase_;
};

}  // namespace

std::optional<UniformPlan> plan_uniform(const ShareSite& site) {
  std::vector<std::uint64_t> begins{0};
  for (const BackingPart& part : site.parts) begins.push_back(begins.back() + part.pages);
  std::optional<UniformPlan> best;
  double best_cost = std::numeric_limits<double>::infinity();
  const auto consider = [&](std::uint32_t pages, std::uint64_t border) {
    double cost = 0;
    auto plan = Layout(site, begins, pages, static_cast<std::uint32_t>(border % pages))
                    .plan(best_cost, cost);
    if (!plan) return;
    best = std::move(plan);
    best_cost = cost;
  };
  const auto above = std::upper_bound(begins.begin(), begins.end(), site.begin);
  const auto first = static_cast<std::size_t>(above - begins.begin()) - 1;
  consider(site.parts[first].pages, begins[first]);
  const bool is_uniform = best && best->is_nothing();
  if (is_uniform && !best->in_the_way) {
    best->is_optional = true;
    return best;
  }
  for (std::uint32_t pages = 1; pages <= kMaxHandlePages; ++pages) {
    for (std::uint32_t phase = 0; phase < pages; ++phase) consider(pages, phase);
  }
  if (best) best->is_optional = is_uniform;
  return best;
}

// --- sharing a block

Result<SharedRange> DeviceAllocator::share(DeviceAddr address) {
  if (shut_down_) return Error{Errc::kShuttingDown, {}, "share"};
  const RelaxedCapture relaxed(driver_);
  if (const auto known = share_as_it_is(address)) return *known;
  const auto while_capturing = [] {
    return Error{Errc::kCaptureActive, {}, "share: memory can't be moved during a capture"};
  };
  if (captures_.load() > 0) return while_capturing();

  for (int tries = 0; tries < kHoldTries; ++tries) {
    // With no lock held: what the device waits for may be another thread's request.
    close_epochs();
    if (const Status idle = driver_.synchronize(); !idle.ok()) return idle.error();
    const MutexLock work(work_mu_);
    // None begins from here on: see begin_capture().
    if (captures_.load() > 0) return while_capturing();
    poll();  // what is free is known to be idle too
    std::vector<StreamRef> streams;
    {
      const MutexLock lock(mu_);
      const auto block = block_in_use(address);
      if (!block.ok()) return block.error();
      const SharePlan plan = plan_share(*block.value());
      if (auto error = make_room_for_copy(plan)) {
        if (plan.uniform->is_optional) return export_block(*block.value());
        return *error;
      }
      for (const Timeline* line : timeline_list_) {
        // Others may be gone, or be another thread's.
        if (line->stream().permanent) streams.push_back(line->stream().ref);
      }
    }
    // What the program queues from now on waits: torch shares in a thread of its queue, while the program
    // goes on. With work_mu_ held, since whoever has it may be in a call that waits for these streams.
    const auto held = driver_.hold(streams);
    if (!held.ok()) return held.error();
    if (held.value() == HoldId{}) continue;  // something long was queued just now
    std::optional<Error> error;
    std::optional<Result<Block*>> block;
    {
      const MutexLock lock(mu_);
      block = block_in_use(address);
      if (block->ok()) error = replace_backing(*block->value());
    }
    driver_.let_go(held.value());
    if (error) return *error;
    const MutexLock lock(mu_);
    block = block_in_use(address);
    if (!block->ok()) return block->error();
    return export_block(*block->value());
  }
  return Error{Errc::kDriverFailure, {}, "share: the streams of this device never come to rest"};
}

// Nothing where the memory would have to be replaced first.
std::optional<Result<SharedRange>> DeviceAllocator::share_as_it_is(DeviceAddr address) {
  const MutexLock work(work_mu_);
  const MutexLock lock(mu_);
  const auto block = block_in_use(address);
  if (!block.ok()) return block.error();
  if (block.value()->region->plain) return SharedRange{block.value()->region->range, {}};
  if (!driver_.traits().exportable) {
    return Error{Errc::kUnsupported, block.value()->size, "share: this device can't export memory"};
  }
  const SharePlan plan = plan_share(*block.value());
  const bool is_known = block.value()->shared;
  const bool is_right = plan.uniform && plan.uniform->is_nothing() && !plan.uniform->in_the_way;
  // There may be more ways once the device has come to rest, which can't be had during a capture.
  const bool is_all = captures_.load() > 0 && (!plan.uniform || plan.uniform->is_optional);
  if (!is_known && !is_right && !is_all) return std::nullopt;
  return export_block(*block.value());
}

Result<Block*> DeviceAllocator::block_in_use(DeviceAddr address) const {
  {
    const AllFronts closed(*this);
  }  // what is parked is not in use
  const Region* region = books_.arena.region_of(address);
  Block* block = region == nullptr ? nullptr : region->block_covering(address, books_.blocks);
  if (block == nullptr || block->state != BlockState::kLive) {
    return Error{Errc::kInvalidArgument, {}, "share: the address is in no block in use"};
  }
  return block;
}

BackingPart DeviceAllocator::part_of(const Mapping& mapping, const Block& block) const {
  BackingPart part;
  part.pages = mapping.handle->pages;
  part.is_exported = mapping.handle->exported;
  for (const Block* b = mapping.region->block_covering(mapping.begin, books_.blocks);
       b != nullptr && b->begin < mapping.end(); b = b->next) {
    if (b == &block || b->is_free()) continue;
    part.has_others = true;
    part.fixed = part.fixed || is_shared(*b);
  }
  return part;
}

// Whether another shared block stands on what is mapped at `page`.
bool DeviceAllocator::is_fixed(const Region& region, DeviceAddr page) const {
  const Mapping* mapping = region.mapping_at(page);
  if (mapping == nullptr || !mapping->is_home() || !mapping->handle->exported) return false;
  for (const Block* b = region.block_covering(mapping->begin, books_.blocks);
       b != nullptr && b->begin < mapping->end(); b = b->next) {
    if (is_shared(*b)) return true;
  }
  return false;
}

// Of the block that stands at the page border `border`, before it or behind it.
Neighbour DeviceAllocator::neighbour_at(const Region& region, DeviceAddr border,
                                        bool behind) const {
  Neighbour neighbour;
  const AddrRange whole = region.range;
  if (behind ? border >= whole.end() : border <= whole.begin) return neighbour;
  const Block* b = region.block_covering(behind ? border : border - kGranule, books_.blocks);
  neighbour.is_across = behind ? b->begin < border : b->end() > border;
  const auto distance = [&](DeviceAddr to) {
    return (behind ? to - border : border - to).n / kPage.n;
  };
  // What is shared already needs nothing more, what is pending never will.
  const auto may_be_shared = [](const Block* block) {
    return block != nullptr && block->state == BlockState::kLive && !block->shared;
  };
  if (!may_be_shared(b)) return neighbour;
  DeviceAddr tip;  // the last granule, seen from the border
  for (int steps = 0;; ++steps) {
    tip = behind ? b->end() - kGranule : b->begin;
    if (is_fixed(region, tip)) {
      const Mapping& mapping = *region.mapping_at(tip);
      const DeviceAddr near = behind ? mapping.begin : mapping.end();
      if (behind ? near < border : near > border) return neighbour;  // one handle holds all of it
      neighbour.demand = {distance(near), distance(near), mapping.handle->pages};
      return neighbour;
    }
    const Block* beyond = behind ? b->next : b->prev;
    const DeviceAddr edge = behind ? b->end() : b->begin;
    if (edge.n % kPage.n == 0) break;
    if (!may_be_shared(beyond) || steps == kChainSteps) return neighbour;  // all is open there
    b = beyond;
  }
  // Handles may end anywhere between its last page and the next that is fixed.
  DeviceAddr page = page_of(tip);
  Demand demand;
  demand.from = demand.to = distance(behind ? page + kPage : page);
  for (; demand.to < demand.from + kMaxHandlePages; ++demand.to) {
    if (behind ? page + kPage >= whole.end() : page <= whole.begin) break;
    page = behind ? page + kPage : page - kPage;
    if (is_fixed(region, page)) break;
  }
  if (demand.to < demand.from + kMaxHandlePages) neighbour.demand = demand;
  return neighbour;
}

DeviceAllocator::SharePlan DeviceAllocator::plan_share(const Block& block) const {
  SharePlan plan;
  if (block.shared) return plan;  // its consumers have what is there now
  const Region& region = *block.region;
  const HeapSet& set = block.heap->set();
  ShareSite site;
  // What may be replaced beside the block, as far as handles under it can reach; nothing where memory is
  // on its way out, or in place for a graph.
  const auto is_movable = [&](const Mapping& m) {
    return m.uses > 0 || m.handle->idle_list != nullptr || set.is_private;
  };
  const auto is_room = [&](DeviceAddr page) {
    if (region.block_covering(page, records_)->state != BlockState::kVoid) return false;
    const Mapping* m = region.mapping_at(page);
    return m == nullptr || m->last_use.complete();
  };
  // A part at `page`, or null; a page that is void has no mapping.
  const auto part_at = [&](DeviceAddr page) -> std::optional<Mapping*> {
    if (is_room(page)) return nullptr;
    Mapping* m = region.mapping_at(page);
    if (m == nullptr || !m->is_home() || !is_movable(*m)) return std::nullopt;
    return m;
  };
  const DeviceAddr first = page_of(block.begin);
  const DeviceAddr last = page_of(block.end() - kGranule);
  const Bytes reach = kPage * (kMaxHandlePages - 1);

  DeviceAddr low = region.mapping_at(first)->begin;
  while (low > region.range.begin && low + reach > first) {
    const auto part = part_at(low - kPage);
    if (!part) break;
    low = *part == nullptr ? low - kPage : (*part)->begin;
  }
  for (DeviceAddr a = low; a < region.range.end() && a <= last + reach;) {
    const auto part = part_at(a);
    if (!part) break;
    plan.mappings.push_back(*part);
    site.parts.push_back(*part == nullptr ? BackingPart{1, /*is_void=*/true}
                                          : part_of(**part, block));
    a = a + kPage * site.parts.back().pages;
  }
  site.begin = (first - low).n / kPage.n;
  site.end = (last - low).n / kPage.n + 1;
  site.fills_first = block.begin == first;
  site.fills_last = block.end() == last + kPage;
  for (std::uint32_t i = 0; i < kMaxHandlePages; ++i) {
    const Bytes distance = kPage * i;
    if (distance <= first - region.range.begin) {
      site.before.push_back(neighbour_at(region, first - distance, /*behind=*/false));
    }
    if (distance < region.range.end() - last) {
      site.after.push_back(neighbour_at(region, last + kPage + distance, /*behind=*/true));
    }
  }
  site.grid = share_grid(block.heap->kind());
  site.origin = (low - region.range.begin).n / kPage.n;
  plan.uniform = plan_uniform(site);
  return plan;
}

Result<SharedRange> DeviceAllocator::export_block(Block& block) {
  SharedRange shared;
  std::vector<HandleId> handles;
  const Region& region = *block.region;
  DeviceAddr end = shared.range.begin = region.mapping_at(block.begin)->begin;
  while (end < block.end()) {
    const Mapping* mapping = region.mapping_at(end);
    mapping->handle->exported = true;
    handles.push_back(mapping->handle->driver);
    shared.handles.push_back({mapping->size(), -1});
    end = mapping->end();
  }
  shared.range.size = end - shared.range.begin;
  block.shared = true;
  const MutexUnlock driver_only(mu_);
  for (std::size_t i = 0; i < handles.size(); ++i) {
    const auto descriptor = driver_.export_handle(handles[i]);
    if (!descriptor.ok()) return descriptor.error();
    shared.handles[i].descriptor = descriptor.value();
  }
  return shared;
}

// The old memory and the new stand side by side for a moment.
std::optional<Error> DeviceAllocator::make_room_for_copy(const SharePlan& plan) {
  if (!plan.uniform) return std::nullopt;
  Bytes more;
  for (const std::uint32_t pages : plan.uniform->created) more += kPage * pages;
  if (reserved() + more > cap()) (void)release_idle(cap() < more ? Bytes{} : cap() - more);
  if (reserved() + more <= cap()) return std::nullopt;
  return Error{Errc::kOutOfMemory, more, "share: no room for a copy of the block's memory"};
}

// Replaces the handles between those that stay. All that is free on them and beside them is taken away
// from others meanwhile; other blocks in use there (UniformPlan::disturbs_others) can't be.
// REQUIRES: the device was idle, and the streams that are known are held.
std::optional<Error> DeviceAllocator::replace_backing(Block& block) {
  const SharePlan plan = plan_share(block);
  if (!plan.uniform || plan.uniform->is_nothing()) return std::nullopt;
  const UniformPlan& uniform = *plan.uniform;
  Heap& heap = *block.heap;
  Region& region = *block.region;
  const auto first = plan.mappings.begin() + static_cast<std::ptrdiff_t>(uniform.keep_front);
  const auto last = plan.mappings.end() - static_cast<std::ptrdiff_t>(uniform.keep_back);
  std::vector<Mapping*> old;
  std::copy_if(first, last, std::back_inserter(old), [](const Mapping* m) { return m != nullptr; });
  DeviceAddr begin = old.front()->begin;
  for (auto i = first; *i == nullptr; ++i) begin = begin - kPage;
  Exchange work{{begin, {}}, {}, {}};
  for (const Mapping* mapping : old) {
    work.old.push_back({{mapping->begin, mapping->size()}, mapping->handle->driver});
  }
  for (const std::uint32_t pages : uniform.created) {
    work.fresh.push_back({{work.range.end(), kPage * pages}, {}});
    work.range.size += kPage * pages;
  }

  std::vector<Unmap> unmaps;
  for (DeviceAddr a = begin; a < work.range.end(); a = a + kPage) {
    Mapping* mapping = region.mapping_at(a);
    if (mapping != nullptr && !mapping->is_home()) drop_alias(mapping, unmaps);
  }
  std::vector<Block*> fillings;
  for (Block* b = region.block_covering(begin, books_.blocks);
       b != nullptr && b->begin < work.range.end(); b = b->next) {
    if (!b->is_free()) continue;
    b = heap.begin_fill(std::max(b->begin, begin), std::min(b->end(), work.range.end()));
    fillings.push_back(b);
  }

  std::optional<Error> error;
  {
    const MutexUnlock driver_only(mu_);
    error = unmap_all(unmaps);
    if (!error) error = exchange_memory(work);
  }

  std::vector<Handle*> fresh;
  for (const Exchange::Place& place : work.fresh) {  // on failure what could not be released
    if (place.handle == HandleId{}) continue;
    Handle* handle = books_.handles.add(place.handle, Policy::pages(place.range.size));
    handle->small = is_small(heap.kind());
    books_.stats.reserved_bytes.add(handle->small, handle->size().n);
    ++books_.stats.num_device_alloc;
    fresh.push_back(handle);
  }
  std::vector<Handle*> idle = fresh;
  if (!error) {
    idle.clear();
    for (const Mapping* mapping : old) idle.push_back(mapping->handle);
    heap.exchange(old, fresh, work.range);
    books_.stats.paths.created += fresh.size();
    books_.stats.paths.rebacked += fresh.size();
    if (uniform.disturbs_others) ++books_.stats.paths.disturbed;
  }
  for (Handle* handle : idle) books_.handles.loose().push(handle);
  for (Block* filling : fillings) heap.cancel_fill(filling);
  restore(unmaps);  // not earlier: the filling does not count as their user
  return error;
}

// The driver's part: copies to new handles at an address that nobody uses, then changes places. On
// failure everything is as it was, but for handles in `fresh` that the driver would not take back.
std::optional<Error> DeviceAllocator::exchange_memory(Exchange& work) {
  const auto scratch = driver_.reserve(work.range.size, kPage);
  if (!scratch.ok()) return scratch.error();
  const auto in_scratch = [&](AddrRange range) {
    return AddrRange{scratch.value().begin + (range.begin - work.range.begin), range.size};
  };
  std::optional<Error> error;
  const auto failed = [&](const auto& result) {
    if (!result.ok() && !error) error = result.error();
    return !result.ok();
  };

  std::size_t mapped = 0;  // at the scratch address
  for (; mapped < work.fresh.size();) {
    Exchange::Place& fresh = work.fresh[mapped];
    const AddrRange range = in_scratch(fresh.range);
    auto created = driver_.create(range.size);
    if (failed(created)) break;
    fresh.handle = created.value();
    if (failed(driver_.map(range, fresh.handle))) break;
    ++mapped;
    if (failed(driver_.set_access(range))) break;
  }
  for (std::size_t i = 0; !error && i < work.old.size();) {
    AddrRange run = work.old[i].range;
    while (++i < work.old.size() && work.old[i].range.begin == run.end()) {
      run.size += work.old[i].range.size;
    }
    (void)failed(driver_.copy(in_scratch(run).begin, run.begin, run.size));
  }

  // From here on the block has no memory until the last call of the second loop.
  std::size_t taken = 0;
  std::size_t placed = 0;
  if (!error) {
    while (taken < work.old.size() && !failed(driver_.unmap(work.old[taken].range))) ++taken;
    while (!error && placed < work.fresh.size() &&
           !failed(driver_.map(work.fresh[placed].range, work.fresh[placed].handle))) {
      ++placed;
    }
    if (!error) (void)failed(driver_.set_access(work.range, peers_));
  }
  if (error && taken > 0) {
    // A driver that does not even let things go back has lost a tensor's memory.
    bool is_back = error->code != Errc::kShuttingDown;
    for (std::size_t i = 0; is_back && i < placed; ++i) {
      is_back = driver_.unmap(work.fresh[i].range).ok();
    }
    for (std::size_t i = 0; is_back && i < taken; ++i) {
      is_back = driver_.map(work.old[i].range, work.old[i].handle).ok() &&
                driver_.set_access(work.old[i].range, peers_).ok();
    }
    GPUMEMX_CHECK(is_back || error->code == Errc::kShuttingDown,
                  "the driver failed twice while a block's memory was replaced");
  }

  bool all_gone = true;
  for (std::size_t i = 0; i < mapped; ++i)
    all_gone = unmap_for_good(in_scratch(work.fresh[i].range)) && all_gone;
  if (all_gone) (void)driver_.unreserve(scratch.value());
  if (error) {
    for (Exchange::Place& place : work.fresh) {
      if (place.handle != HandleId{} && driver_.release(place.handle).ok()) place.handle = {};
    }
  }
  return error;
}

void Heap::exchange(const std::vector<Mapping*>& old, const std::vector<Handle*>& fresh,
                    AddrRange range) {
  Region* region = old.front()->region;
  // What another thread freed meanwhile lies in the free index by the old handles' borders.
  std::vector<Block*> ready;
  for (Block* b = region->block_covering(range.begin, books_.blocks);
       b != nullptr && b->begin < range.end(); b = b->next) {
    if (b->state == BlockState::kReady) ready.push_back(b);
  }
  for (Block* b : ready) unlink(b);

  Stamp last_use;  // of neighbours; all of it on this heap's own stream
  for (Mapping* mapping : old) {
    Handle* handle = mapping->handle;
    if (handle->idle_list != nullptr) handle->idle_list->remove(handle);  // idle since just now
    if (!mapping->last_use.complete() && mapping->last_use.epoch >= last_use.epoch) {
      last_use = mapping->last_use;
    }
    segment_changed(mapping, false);
    region->set_mapping({mapping->begin, mapping->size()}, nullptr);
    handle->last_use = mapping->last_use;
    handle->home = nullptr;
    handle->pinned = handle->kept = false;
    books_.handles.remove_mapping(mapping);
  }
  DeviceAddr at = range.begin;
  for (Handle* handle : fresh) {
    Mapping* mapping = books_.handles.add_mapping(handle, region, at);
    at = mapping->end();
    handle->home = mapping;
    handle->pinned = set_.is_private;
    mapping->last_use = last_use;
    region->set_mapping({mapping->begin, mapping->size()}, mapping);
    region->mapped_end = std::max(region->mapped_end, at);
    for (const Block* b = region->block_covering(mapping->begin, books_.blocks);
         b != nullptr && b->begin < at; b = b->next) {
      if (!b->is_free()) ++mapping->uses;
    }
    segment_changed(mapping, true);
    if (mapping->uses == 0) {  // only what was freed meanwhile stands here
      handle->last_use = last_use;
      retire(handle);
    }
  }
  for (Block* b : ready) link(b);
}

// --- memory of other processes

Result<DeviceAddr> DeviceAllocator::import_memory(const std::vector<ForeignHandle>& handles) {
  if (shut_down_) return Error{Errc::kShuttingDown, {}, "import_memory"};
  const Bytes granularity = driver_.traits().granularity;
  Import import;
  for (const ForeignHandle& h : handles) {
    if (h.size.n == 0 || h.size.n % granularity.n != 0 || h.size > kMaxRequest) {
      return Error{Errc::kInvalidArgument, h.size, "import_memory: no size of a handle"};
    }
    import.range.size += h.size;
  }
  if (handles.empty()) return Error{Errc::kInvalidArgument, {}, "import_memory: no handles"};
  close_ended_imports();
  const RelaxedCapture relaxed(driver_);
  const MutexLock work(work_mu_);
  const auto range = driver_.reserve(import.range.size, granularity);
  if (!range.ok()) return range.error();
  import.range = range.value();
  std::optional<Error> error;
  DeviceAddr at = import.range.begin;
  for (const ForeignHandle& h : handles) {
    const auto handle = std::holds_alternative<int>(h.handle)
                            ? driver_.import_handle(std::get<int>(h.handle))
                            : driver_.import_fabric(std::get<FabricHandle>(h.handle));
    if (!handle.ok()) {
      error = handle.error();
      break;
    }
    import.handles.push_back(handle.value());
    const AddrRange place{at, h.size};
    if (const Status mapped = driver_.map(place, handle.value()); !mapped.ok()) {
      error = mapped.error();
      break;
    }
    import.mapped.push_back(place);
    at = place.end();
  }
  if (!error) {
    const Status usable = driver_.set_access(import.range, peers_);
    if (!usable.ok()) error = usable.error();
  }
  if (error) {
    drop(import);
    return *error;
  }
  imports_.emplace(import.range.begin, import);
  return import.range.begin;
}

void DeviceAllocator::close_import(DeviceAddr address) {
  if (shut_down_) return;
  {
    const MutexLock work(work_mu_);
    GPUMEMX_CHECK(imports_.contains(address), "close_import() of an address that was not imported");
    ended_imports_.push_back(address);
  }
  close_ended_imports();
}

void DeviceAllocator::close_ended_imports() {
  if (captures_.load() > 0) return;  // waiting would end the capture: the next import does it
  const RelaxedCapture relaxed(driver_);
  std::vector<DeviceAddr> ended;
  {
    const MutexLock work(work_mu_);
    ended = std::exchange(ended_imports_, {});
  }
  if (ended.empty()) return;
  // With no lock held. Work on the memory may be queued on any stream, as torch's own receiver has it.
  (void)driver_.synchronize();
  const MutexLock work(work_mu_);
  for (const DeviceAddr address : ended) {
    const auto found = imports_.find(address);
    drop(found->second);
    imports_.erase(found);
  }
}

// Of a mapping that is in no books. Asked twice, for nobody comes back to it: what the driver keeps
// then costs addresses, and the memory of its handle.
bool DeviceAllocator::unmap_for_good(AddrRange range) {
  return driver_.unmap(range).ok() || driver_.unmap(range).ok();
}

void DeviceAllocator::drop(const Import& import) {
  bool all_gone = true;
  for (std::size_t i = 0; i < import.handles.size(); ++i) {
    const bool unmapped = i >= import.mapped.size() || unmap_for_good(import.mapped[i]);
    all_gone = unmapped && all_gone;
    if (unmapped) (void)driver_.release(import.handles[i]);
  }
  if (all_gone) (void)driver_.unreserve(import.range);
}

void DeviceAllocator::drop_imports() {
  const MutexLock work(work_mu_);
  if (!imports_.empty()) (void)driver_.synchronize();
  for (const auto& [address, import] : imports_) drop(import);
  imports_.clear();
}

// --- peers

Status DeviceAllocator::add_peer(int device) {
  if (shut_down_) return ok_status();
  const RelaxedCapture relaxed(driver_);
  // Held to the end: nothing is mapped or unmapped meanwhile, so that no mapping is missed.
  const MutexLock work(work_mu_);
  if (std::find(peers_.begin(), peers_.end(), device) != peers_.end()) return ok_status();
  std::vector<AddrRange> ranges;
  {
    const MutexLock lock(mu_);
    books_.handles.for_each([&](const Handle* handle) {
      if (handle->driver == HandleId{})
        return;  // plain memory: cudaDeviceEnablePeerAccess() does it
      for (const Mapping* m = handle->aliases; m != nullptr; m = m->next_alias) {
        ranges.push_back({m->begin, m->size()});
      }
    });
  }
  for (const auto& [address, import] : imports_) ranges.push_back(import.range);
  for (const AddrRange range : ranges) {
    const Status done = driver_.set_access(range, {device});
    if (!done.ok()) return done;  // who has access keeps it; the next call begins anew
  }
  peers_.push_back(device);
  return ok_status();
}

// --- a block at an address

std::optional<AllocResult> DeviceAllocator::allocate_at(const AllocRequest& request,
                                                        DeviceAddr address) {
  if (shut_down_ || request.size > kMaxRequest || address.n % kGranule.n != 0) return std::nullopt;
  const Bytes size = block_size(request.size);
  const RelaxedCapture relaxed(driver_);
  do {
    close_epochs();
    const MutexLock work(work_mu_);
    poll();
    const MutexLock lock(mu_);
    unpark_all();
    HeapSet& set = heap_set(request.stream, request.pool);
    Region* region = books_.arena.region_of(address);
    if (region == nullptr || &region->heap->set() != &set || size > region->range.end() - address) {
      return std::nullopt;
    }
    Heap& heap = *region->heap;
    Block* first = region->block_covering(address, books_.blocks);
    if (first->state == BlockState::kReady && size <= first->end() - address) {
      ++books_.stats.paths.hits;
      return hand_out(heap.take(first, address, size), request);
    }
    const Block* last = first;
    for (; last != nullptr && last->is_free() && last->end() < address + size; last = last->next) {
    }
    if (last == nullptr || !last->is_free() || region->plain) return std::nullopt;
    MissPlanner planner(default_sets_, books_.handles);
    const Candidate place{0, 0, last->end() - first->begin, address, last->end(), region};
    const auto plan = planner.plan(heap, place, size, policy(request.size),
                                   /*may_exceed_budget=*/true);
    if (plan) {
      ++books_.stats.paths.misses;
      Served served = execute(*plan);
      if (served.block == nullptr) return std::nullopt;
      return hand_out(served.block, request);
    }
    // Other memory has to come here, which work that is queued on this address does not allow yet.
  } while (wait_for_any());
  return std::nullopt;
}

}  // namespace gpumemx
