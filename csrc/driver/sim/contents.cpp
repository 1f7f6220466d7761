// SPDX-License-Identifier: BSD-3-Clause
//
// A sorted vector and not a tree: a handle holds tens of runs, seldom hundreds.
#include "driver/sim/contents.hpp"

#include <algorithm>
#include <array>

namespace gpumemx {

namespace {

bool begins_before(const Contents::Run& run, std::uint64_t granule) { return run.begin < granule; }
bool begins_after(std::uint64_t granule, const Contents::Run& run) { return granule < run.begin; }

}  // namespace

Contents::Contents(Bytes size) : granules_((size.n + kGranule - 1) / kGranule), runs_(1) {}

void Contents::write(std::uint64_t offset, std::uint64_t size, std::uint64_t tag,
                     const Writer& writer) {
  const std::uint64_t begin = offset / kGranule;
  const std::uint64_t end = (offset + size + kGranule - 1) / kGranule;
  const auto first = std::upper_bound(runs_.begin(), runs_.end(), begin, begins_after) - 1;
  const auto past = std::lower_bound(first, runs_.end(), end, begins_before);
  const std::uint64_t past_begin = past == runs_.end() ? granules_ : past->begin;

  // What replaces [first, past): the part before, the write, the part behind.
  std::array<Run, 3> pieces;
  std::size_t count = 0;
  if (first->begin < begin) pieces[count++] = *first;
  pieces[count++] = {begin, tag, writer};
  if (end < past_begin) {
    pieces[count] = *(past - 1);
    pieces[count++].begin = end;
  }

  const auto replaced = static_cast<std::size_t>(past - first);
  const std::size_t copied = std::min(count, replaced);
  const auto rest = std::copy_n(pieces.begin(), copied, first);
  if (count <= replaced) {
    runs_.erase(rest, past);
  } else {
    runs_.insert(rest, pieces.begin() + static_cast<std::ptrdiff_t>(copied),
                 pieces.begin() + static_cast<std::ptrdiff_t>(count));
  }
}

const Contents::Run* Contents::find_other(std::uint64_t offset, std::uint64_t size,
                                          std::uint64_t tag) const {
  const std::uint64_t begin = offset / kGranule;
  const std::uint64_t end = (offset + size + kGranule - 1) / kGranule;
  auto run = std::upper_bound(runs_.begin(), runs_.end(), begin, begins_after) - 1;
  for (; run != runs_.end() && run->begin < end; ++run) {
    if (run->tag != tag || run->tag == 0) return &*run;
  }
  return nullptr;
}

std::vector<Contents::Run> Contents::runs_in(std::uint64_t offset, std::uint64_t size) const {
  const std::uint64_t begin = offset / kGranule;
  const std::uint64_t end = (offset + size) / kGranule;
  std::vector<Run> found;
  auto run = std::upper_bound(runs_.begin(), runs_.end(), begin, begins_after) - 1;
  for (; run != runs_.end() && run->begin < end; ++run) {
    found.push_back(*run);
    found.back().begin = std::max(run->begin, begin);
  }
  return found;
}

}  // namespace gpumemx
