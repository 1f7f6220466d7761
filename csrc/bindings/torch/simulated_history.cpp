// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/torch/simulated_history.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <pybind11/stl.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "adapter/install.hpp"

namespace py = pybind11;

namespace gpumemx::bindings {

namespace {

using adapter::torch_alloc::RecordContext;
using adapter::torch_alloc::TraceEntry;

// As torch's own two, for stacks="python" and "all".
std::shared_ptr<c10::GatheredContext> gather() {
  return torch::CapturedTraceback::gather(true, true, false);
}
std::shared_ptr<c10::GatheredContext> gather_with_cpp() {
  return torch::CapturedTraceback::gather(true, true, true);
}

// The arguments as torch.cuda.memory._record_memory_history() has them.
void record(const std::optional<std::string>& enabled, const std::optional<std::string>& context,
            const std::string& stacks, std::size_t max_entries, bool clear_history,
            const std::vector<std::string>& skip_actions) {
  const std::map<std::string, RecordContext> levels{{"state", RecordContext::STATE},
                                                    {"alloc", RecordContext::ALLOC},
                                                    {"all", RecordContext::ALL}};
  adapter::installed()->recordHistory(
      enabled.has_value(), stacks == "all" ? gather_with_cpp : gather,
      enabled == "all" ? max_entries : 1, context ? levels.at(*context) : RecordContext::NEVER,
      clear_history, skip_actions);
}

// What an attached tracker was told. Leaked: trackers can't be detached.
struct Told {
  std::mutex mu;
  std::vector<TraceEntry> entries;
  std::string fail_at;  // throw at the next entry of this action
};

const char* to_text(TraceEntry::Action action) {
  switch (action) {
    case TraceEntry::ALLOC: return "alloc";
    case TraceEntry::FREE_REQUESTED: return "free_requested";
    case TraceEntry::FREE_COMPLETED: return "free_completed";
    case TraceEntry::SEGMENT_ALLOC: return "segment_alloc";
    case TraceEntry::SEGMENT_FREE: return "segment_free";
    case TraceEntry::SEGMENT_MAP: return "segment_map";
    case TraceEntry::SEGMENT_UNMAP: return "segment_unmap";
    case TraceEntry::SNAPSHOT: return "snapshot";
    case TraceEntry::OOM: return "oom";
    default: return "annotate";
  }
}

class Tracker {
 public:
  Tracker() : told_(new Told) {
    adapter::installed()->attachAllocatorTraceTracker([told = told_](const TraceEntry& entry) {
      const std::lock_guard<std::mutex> lock(told->mu);
      told->entries.push_back(entry);
      if (told->fail_at == to_text(entry.action_)) {
        told->fail_at.clear();
        throw std::runtime_error("the tracker could not register this");
      }
    });
  }
  void fail_at(std::string action) {
    const std::lock_guard<std::mutex> lock(told_->mu);
    told_->fail_at = std::move(action);
  }
  py::list take() {
    std::vector<TraceEntry> entries;
    {
      const std::lock_guard<std::mutex> lock(told_->mu);
      entries.swap(told_->entries);
    }
    py::list out;
    for (const TraceEntry& e : entries) {
      py::dict d;
      d["action"] = to_text(e.action_);
      d["device"] = static_cast<int>(e.device_);
      d["addr"] = e.addr_;
      d["size"] = e.size_;
      d["pool_id"] = e.mempool_;
      d["has_stack"] = e.context_ != nullptr;
      d["user_metadata"] = e.user_metadata_;
      out.append(d);
    }
    return out;
  }

 private:
  Told* const told_;
};

std::mutex rejections_mu;
std::vector<std::tuple<std::int64_t, std::size_t, std::size_t, std::size_t>> rejections;

}  // namespace

void bind_simulated_history(py::module_& m) {
  m.def("_sim_record_history", &record, py::arg("enabled") = "all", py::arg("context") = "all",
        py::arg("stacks") = "python", py::arg("max_entries") = ~std::size_t{0},
        py::arg("clear_history") = false, py::arg("skip_actions") = std::vector<std::string>{});
  m.def("_sim_record_stream_id", [](int device, std::uintptr_t address, std::uint64_t stream_id) {
    const py::gil_scoped_release release;
    return DeviceRegistry::instance().if_open(device)->allocator->record_stream(
        {address}, {{StreamId{stream_id}, stream_id}, true});
  });
  m.def("_sim_mark", [](int device, const std::map<std::string, std::string>& metadata) {
    adapter::installed()->memory_history().add_mark(static_cast<c10::DeviceIndex>(device),
                                                    {metadata.begin(), metadata.end()});
  });
  m.def("_sim_push_compile_context",
        [](std::string text) { adapter::installed()->pushCompileContext(text); });
  m.def("_sim_pop_compile_context", [] { adapter::installed()->popCompileContext(); });
  m.def("_sim_set_metadata",
        [](const std::string& text) { adapter::installed()->setUserMetadata(text); });
  m.def("_sim_on_out_of_memory", [](py::object callback) {
    // Leaked: observers can't be detached.
    auto* call = new py::object(std::move(callback));
    adapter::installed()->attachOutOfMemoryObserver(
        [call](std::int64_t device, std::size_t size, std::size_t total, std::size_t free) {
          const py::gil_scoped_acquire gil;
          (*call)(device, size, total, free);
        });
  });
  m.def("_sim_watch_rejections", [] {
    adapter::installed()->attachOomRejectionObserver(
        [](std::int64_t device, std::size_t size, std::size_t allocated, std::size_t total) {
          const std::lock_guard<std::mutex> lock(rejections_mu);
          rejections.emplace_back(device, size, allocated, total);
        });
  });
  m.def("_sim_rejections", [] {
    const std::lock_guard<std::mutex> lock(rejections_mu);
    return rejections;
  });
  py::class_<Tracker>(m, "_SimTracker")
      .def(py::init<>())
      .def("fail_at", &Tracker::fail_at)
      .def("take", &Tracker::take);
}

}  // namespace gpumemx::bindings
