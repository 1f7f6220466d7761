// SPDX-License-Identifier: BSD-3-Clause
//
// A real device under the contract suite. Kernels are the driver's own memsets and copies, so that
// no device compiler is needed. Empty where <cuda.h> is not.
#ifdef GPUMEMX_HAVE_CUDA_DRIVER

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "driver/cuda/cuda_driver.hpp"
#include "driver/cuda/entry_points.hpp"
#include "support/contract_device.hpp"

namespace gpumemx {
namespace {

// Functions that only tests use.
struct WorkFunctions {
  decltype(&::cuStreamCreate) stream_create = nullptr;
  decltype(&::cuStreamDestroy) stream_destroy = nullptr;
  decltype(&::cuStreamBeginCapture) begin_capture = nullptr;
  decltype(&::cuStreamEndCapture) end_capture = nullptr;
  decltype(&::cuGraphDestroy) graph_destroy = nullptr;
  decltype(&::cuMemsetD32Async) memset_d32 = nullptr;
  decltype(&::cuMemcpyDtoHAsync) copy_to_host = nullptr;
  decltype(&::cuLaunchHostFunc) launch_host = nullptr;
  decltype(&::cuMemHostAlloc) host_alloc = nullptr;
  decltype(&::cuMemFreeHost) host_free = nullptr;
  decltype(&::cuCtxSynchronize) synchronize = nullptr;
};

template <class Function>
bool load(Function& function, const char* name, int version) {
  function = reinterpret_cast<Function>(find_cuda_function(name, version));
  return function != nullptr;
}

bool load_all(WorkFunctions& cu) {
  return load(cu.stream_create, "cuStreamCreate", 2000) &&
         load(cu.stream_destroy, "cuStreamDestroy", 4000) &&
         load(cu.begin_capture, "cuStreamBeginCapture", 10010) &&
         load(cu.end_capture, "cuStreamEndCapture", 10000) &&
         load(cu.graph_destroy, "cuGraphDestroy", 10000) &&
         load(cu.memset_d32, "cuMemsetD32Async", 3020) &&
         load(cu.copy_to_host, "cuMemcpyDtoHAsync", 3020) &&
         load(cu.launch_host, "cuLaunchHostFunc", 10000) &&
         load(cu.host_alloc, "cuMemHostAlloc", 2020) && load(cu.host_free, "cuMemFreeHost", 2000) &&
         load(cu.synchronize, "cuCtxSynchronize", 2000);
}

constexpr Bytes kHostBuffer = 64_MiB;
constexpr auto kLongestHold = std::chrono::seconds(10);

class CudaContractDevice final : public ContractDevice {
 public:
  using Opened = Result<std::unique_ptr<CudaDriver>>;

  CudaContractDevice(Opened opened, const WorkFunctions& cu)  // REQUIRES: opened.ok()
      : opened_(std::move(opened)), driver_(opened_.value().get()), cu_(cu) {
    // The suite's own calls need the context on this thread.
    const Result<EntryPoints>& entry = cuda_entry_points();
    CUcontext context = nullptr;
    (void)entry.value().primary_retain(&context, driver_->device());
    (void)entry.value().context_push(context);
    // Pinned, or copies would wait for the stream; taken now, for pinning may wait too.
    void* buffer = nullptr;
    expect(cu_.host_alloc(&buffer, kHostBuffer.n, 0), "cuMemHostAlloc");
    host_ = static_cast<std::byte*>(buffer);
  }

  ~CudaContractDevice() override {
    for (Hold& hold : holds_) hold.may_go = true;
    (void)cu_.synchronize();
    (void)cu_.host_free(host_);
    for (CUstream stream : streams_) (void)cu_.stream_destroy(stream);
    const EntryPoints& entry = cuda_entry_points().value();
    CUcontext ours = nullptr;
    (void)entry.context_pop(&ours);
    (void)entry.primary_release(driver_->device());
  }

  DeviceDriver& driver() override { return *driver_; }

  StreamRef new_stream() override {
    CUstream stream = nullptr;
    expect(cu_.stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    streams_.push_back(stream);
    const auto native = reinterpret_cast<std::uintptr_t>(stream);
    const Result<StreamId> id = driver_->stream_id(native);
    if (!id.ok()) complaints_ += id.error().where + "\n";
    return {id.ok() ? id.value() : StreamId{}, native};
  }

  void fill(StreamRef stream, AddrRange range, std::uint32_t value) override {
    expect(cu_.memset_d32(range.begin.n, value, range.size.n / 4, native(stream)),
           "cuMemsetD32Async");
  }

  void check(StreamRef stream, AddrRange range, std::uint32_t value) override {
    if (host_used_ + range.size.n > kHostBuffer.n) {
      complaints_ += "the test checks more than the host buffer holds\n";
      return;
    }
    std::byte* copy = host_ + host_used_;
    host_used_ += range.size.n;
    std::memset(copy, 0xee, range.size.n);
    expect(cu_.copy_to_host(copy, range.begin.n, range.size.n, native(stream)),
           "cuMemcpyDtoHAsync");
    checks_.push_back({copy, range, value});
  }

  void hold(StreamRef stream) override {
    Hold& hold = holds_.emplace_back();
    hold.stream = stream;
    expect(cu_.launch_host(native(stream), &CudaContractDevice::wait_for_flag, &hold),
           "cuLaunchHostFunc");
  }

  void let_go(StreamRef stream) override {
    for (Hold& hold : holds_) {
      if (hold.stream == stream) hold.may_go = true;
    }
  }

  void begin_capture(StreamRef stream, CaptureMode mode) override {
    const auto cu_mode = mode == CaptureMode::kGlobal        ? CU_STREAM_CAPTURE_MODE_GLOBAL
                         : mode == CaptureMode::kThreadLocal ? CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                                                             : CU_STREAM_CAPTURE_MODE_RELAXED;
    expect(cu_.begin_capture(native(stream), cu_mode), "cuStreamBeginCapture");
  }

  bool end_capture(StreamRef stream) override {
    CUgraph graph = nullptr;
    const CUresult r = cu_.end_capture(native(stream), &graph);
    if (graph != nullptr) (void)cu_.graph_destroy(graph);
    return r == CUDA_SUCCESS;
  }

  std::string finish() override {
    expect(cu_.synchronize(), "cuCtxSynchronize");
    for (const Check& check : checks_) {
      for (std::uint64_t at = 0; at < check.range.size.n; at += 4) {
        std::uint32_t found = 0;
        std::memcpy(&found, check.copy + at, 4);
        if (found == check.value) continue;
        complaints_ += "byte " + std::to_string(at) + " holds " + std::to_string(found) +
                       " instead of " + std::to_string(check.value) + "\n";
        break;
      }
    }
    for (const Hold& hold : holds_) {
      if (hold.is_overdue) complaints_ += "a call waited for work that was held\n";
    }
    checks_.clear();
    holds_.clear();
    host_used_ = 0;
    return std::exchange(complaints_, {});
  }

  void forget_complaints() override {}
  bool is_alone() const override { return false; }

 private:
  struct Hold {
    StreamRef stream;
    std::atomic<bool> may_go{false};
    std::atomic<bool> is_overdue{false};
  };
  struct Check {
    const std::byte* copy;
    AddrRange range;
    std::uint32_t value;
  };

  static CUstream native(StreamRef stream) { return reinterpret_cast<CUstream>(stream.native); }

  // Runs on a thread of the driver. Gives up in the end, so that a driver call that waits for it
  // shows as a failure and not as a hang.
  static void CUDA_CB wait_for_flag(void* data) {
    Hold& hold = *static_cast<Hold*>(data);
    const auto until = std::chrono::steady_clock::now() + kLongestHold;
    while (!hold.may_go) {
      if (std::chrono::steady_clock::now() > until) {
        hold.is_overdue = true;
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  void expect(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS) {
      complaints_ += std::string(call) + ": error " + std::to_string(result) + "\n";
    }
  }

  const Opened opened_;
  CudaDriver* const driver_;
  const WorkFunctions cu_;
  std::byte* host_ = nullptr;
  std::uint64_t host_used_ = 0;
  std::vector<CUstream> streams_;
  std::deque<Hold> holds_;  // their addresses are with the driver
  std::vector<Check> checks_;
  std::string complaints_;
};

}  // namespace

std::unique_ptr<ContractDevice> make_cuda_contract_device(std::string& why) {
  // Kept open: else the device's context would be made anew for every test.
  static const Result<std::unique_ptr<CudaDriver>> keeper = CudaDriver::open(0);
  if (!keeper.ok()) {
    why = keeper.error().where;
    return nullptr;
  }
  if (!keeper.value()->traits().virtual_memory) {
    why = "the device has no virtual memory";
    return nullptr;
  }
  WorkFunctions cu;
  if (!load_all(cu)) {
    why = "the CUDA driver lacks a function that the suite needs";
    return nullptr;
  }
  Result<std::unique_ptr<CudaDriver>> opened = CudaDriver::open(0);
  if (!opened.ok()) {
    why = opened.error().where;
    return nullptr;
  }
  return std::make_unique<CudaContractDevice>(std::move(opened), cu);
}

}  // namespace gpumemx

#endif  // GPUMEMX_HAVE_CUDA_DRIVER
