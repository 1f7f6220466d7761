// SPDX-License-Identifier: BSD-3-Clause
#include "monitor/summary.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/text.hpp"

namespace gpumemx {

namespace {

void line(std::string& out, const char* what, Bytes size, const char* meaning, Bytes total) {
  std::array<char, 16> share{};
  if (total.n != 0) {
    std::snprintf(share.data(), share.size(), "%5.1f %%",
                  100.0 * static_cast<double>(size.n) / static_cast<double>(total.n));
  }
  std::array<char, 128> text{};
  std::snprintf(text.data(), text.size(), "  %-13s %12s %8s  %s\n", what,
                format_bytes(size).c_str(), share.data(), meaning);
  out += text.data();
}

}  // namespace

std::string summary_table(int device, const std::string& allocator, const MemoryReport& report,
                          Bytes workspaces, const std::string& note) {
  const MemoryFigures& f = report.figures;
  const Bytes total = f.device_known ? f.device_total : f.reserved;
  std::string out = "GPU " + std::to_string(device) + " memory, allocator " + allocator;
  out += f.device_known ? ", " + format_bytes(f.device_total) + " in all\n" : "\n";
  const auto part = [&](const char* what, Bytes size, const std::string& meaning) {
    if (size.n != 0) line(out, what, size, meaning.c_str(), total);
  };
  line(out, "live", f.live, "in tensors", total);
  part("  rounding", f.live - f.live_requested, "up to 512 B a tensor");
  part("  workspaces", workspaces, "of cuBLAS, kept by torch");
  line(out, "pending", f.pending, "freed, other streams still use it", total);
  line(out, "cached", f.idle + f.idle_pending, "can be given back", total);
  part("  waiting", f.idle_pending, "once queued work is done");
  line(out, "held", f.held + f.idle_private, "cached, tied to what is in use", total);
  part("  by live", report.held_by.live, "beside blocks in use");
  part("  by pending", report.held_by.pending, "beside pending blocks");
  part("  by pools", report.held_by.pools, "in private pools");
  line(out, "reserved", f.reserved, "= live + pending + cached + held", total);
  part("  in pools", f.in_private_pools,
       "in " + std::to_string(report.pools.size()) +
           (report.pools.size() == 1 ? " private pool" : " private pools"));
  if (f.device_known) {
    line(out, "others", f.others, "all that torch did not reserve", total);
    line(out, "free", f.device_free, "what the driver can hand out", total);
  } else {
    out += "  others, free: unknown, the device was not asked\n";
  }
  out += state_in_words(f) + "\n";
  if (!note.empty()) out += note + "\n";
  return out;
}

std::string state_in_words(const MemoryFigures& f) {
  const Bytes cached = f.idle + f.idle_pending;
  const Bytes held = f.held + f.idle_private;
  if (f.reserved.n == 0) return "Nothing is reserved.";
  if (f.device_known && f.device_free.n < f.device_total.n / 50) {
    if (cached.n * 10 > f.reserved.n) {
      return "The card is nearly full, but " + format_bytes(cached) +
             " of it is cache that serves new requests.";
    }
    if (f.others.n > f.reserved.n) {
      return "The card is nearly full, most of it in the hands of others.";
    }
    return "The card is nearly full, and nearly all of it is in use.";
  }
  if (held.n * 10 > f.reserved.n) {
    return format_bytes(held) +
           " is cached but tied to something in use, so it can't be given back.";
  }
  if (cached.n * 10 > f.reserved.n) {
    return format_bytes(cached) + " is cached; clear_cache() would give " +
           (f.idle_pending.n == 0 ? "it" : format_bytes(f.idle) + " of it") + " back.";
  }
  return "Nearly all that is reserved is in use.";
}

std::string describe(const TrimReport& r) {
  std::string out = format_bytes(r.released) + " given back";
  if (r.predicted != r.released && r.predicted.n != 0) {
    out += " (" + format_bytes(r.predicted) + " was expected)";
  }
  const struct {
    Bytes size;
    const char* why;
  } stayed[] = {{r.live, "in use"},
                {r.held, "on handles that something in use shares"},
                {r.pending, "still used by queued work"},
                {r.pools, "in private pools"},
                {r.wanted, "kept as asked"}};
  for (const auto& [size, why] : stayed) {
    if (size.n != 0) out += "; " + format_bytes(size) + " " + why;
  }
  return out;
}

}  // namespace gpumemx
