// SPDX-License-Identifier: BSD-3-Clause
#include "monitor/oom_report.hpp"

#include "base/text.hpp"

namespace gpumemx {

std::string OomReport::advice() const {
  const OomVerdict& v = verdict;
  switch (v.cause) {
    case OomCause::kCapped:
      // Without moving anything, so it is surely enough.
      if (!v.device_known || v.block > v.device_free) return "";
      return "A cap of " + format_bytes(round_up(v.reserved + v.block, 1_MiB)) +
             " would have let it pass.";
    case OomCause::kFragmented:
      return is_plain ? "mode:virtual, the default, maps memory where it is needed." : "";
    case OomCause::kOtherUsers: return "nvidia-smi shows the processes on this device.";
    case OomCause::kPendingOnStreams:
      return "torch.cuda.synchronize() before it makes that memory usable.";
    case OomCause::kHeldByPools:
      return "CUDA graphs that never run at the same time can share one pool.";
    case OomCause::kDuringCapture:
      return "Run the work once before it is captured, so that its memory is there.";
    // Only freeing helps, or it is not known what would.
    case OomCause::kFull:
    case OomCause::kNonsenseSize:
    case OomCause::kDriverRefused:
    case OomCause::kShuttingDown: break;
  }
  return "";
}

std::string OomReport::text() const {
  std::string out = std::string("Cause: ") + to_string(verdict.cause) + ". " + verdict.text();
  if (verdict.cause == OomCause::kCapped && !cap_source.empty()) {
    out += " The cap was set by " + cap_source + ".";
  }
  for (std::size_t i = 0; i < holders.size(); ++i) {
    const OomHolder& h = holders[i];
    out += (i == 0 ? " Most is held by " : ", ") + h.site + " (" + format_bytes(h.bytes) + " in " +
           std::to_string(h.blocks) + (h.blocks == 1 ? " block)" : " blocks)");
  }
  if (!holders.empty()) out += ".";
  if (const std::string what = advice(); !what.empty()) out += " " + what;
  return id.empty() ? out : out + " (report " + id + ")";
}

}  // namespace gpumemx
