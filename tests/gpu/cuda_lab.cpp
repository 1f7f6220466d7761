// SPDX-License-Identifier: BSD-3-Clause
//
// Kernels are PTX, compiled by the driver: no device compiler is needed.
#include "cuda_lab.hpp"

#ifndef GPUMEMX_HAVE_CUDA_DRIVER

namespace gpumemx {

CudaLab* CudaLab::open(std::string& why) {
  why = "the CUDA driver was left out of this build";
  return nullptr;
}

}  // namespace gpumemx

#else

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "driver/cuda/cuda_driver.hpp"
#include "driver/cuda/entry_points.hpp"

namespace gpumemx {
namespace {

// fill, check   word i is i x factor xor seed; a factor of 0 makes all words alike
// hold          until the host has set the word at `flag`; sets the next one if that took too long
constexpr const char* kKernels = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(.param .u64 begin, .param .u64 words, .param .u32 factor, .param .u32 seed,
                     .param .u64 delay)
{
  .reg .pred %p<2>;
  .reg .b32 %r<8>;
  .reg .b64 %d<12>;
  ld.param.u64 %d0, [begin];
  ld.param.u64 %d1, [words];
  ld.param.u32 %r0, [factor];
  ld.param.u32 %r1, [seed];
  ld.param.u64 %d2, [delay];
  mov.u64 %d3, %globaltimer;
SPIN:
  mov.u64 %d4, %globaltimer;
  sub.u64 %d4, %d4, %d3;
  setp.lt.u64 %p0, %d4, %d2;
  @%p0 bra SPIN;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mov.u32 %r5, %nctaid.x;
  mul.wide.u32 %d5, %r2, %r3;
  cvt.u64.u32 %d6, %r4;
  add.u64 %d5, %d5, %d6;
  mul.wide.u32 %d7, %r5, %r3;
LOOP:
  setp.ge.u64 %p1, %d5, %d1;
  @%p1 bra DONE;
  cvt.u32.u64 %r6, %d5;
  mul.lo.u32 %r6, %r6, %r0;
  xor.b32 %r6, %r6, %r1;
  shl.b64 %d8, %d5, 2;
  add.u64 %d8, %d8, %d0;
  st.global.u32 [%d8], %r6;
  add.u64 %d5, %d5, %d7;
  bra LOOP;
DONE:
  ret;
}

.visible .entry check(.param .u64 begin, .param .u64 words, .param .u32 factor, .param .u32 seed,
                      .param .u64 delay, .param .u64 counter)
{
  .reg .pred %p<4>;
  .reg .b32 %r<10>;
  .reg .b64 %d<12>;
  ld.param.u64 %d0, [begin];
  ld.param.u64 %d1, [words];
  ld.param.u32 %r0, [factor];
  ld.param.u32 %r1, [seed];
  ld.param.u64 %d2, [delay];
  ld.param.u64 %d9, [counter];
  mov.u64 %d3, %globaltimer;
SPIN:
  mov.u64 %d4, %globaltimer;
  sub.u64 %d4, %d4, %d3;
  setp.lt.u64 %p0, %d4, %d2;
  @%p0 bra SPIN;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mov.u32 %r5, %nctaid.x;
  mul.wide.u32 %d5, %r2, %r3;
  cvt.u64.u32 %d6, %r4;
  add.u64 %d5, %d5, %d6;
  mul.wide.u32 %d7, %r5, %r3;
  mov.u32 %r8, 0;
LOOP:
  setp.ge.u64 %p1, %d5, %d1;
  @%p1 bra DONE;
  cvt.u32.u64 %r6, %d5;
  mul.lo.u32 %r6, %r6, %r0;
  xor.b32 %r6, %r6, %r1;
  shl.b64 %d8, %d5, 2;
  add.u64 %d8, %d8, %d0;
  ld.global.u32 %r7, [%d8];
  setp.ne.u32 %p2, %r6, %r7;
  @%p2 add.u32 %r8, %r8, 1;
  add.u64 %d5, %d5, %d7;
  bra LOOP;
DONE:
  setp.ne.u32 %p3, %r8, 0;
  @%p3 red.global.add.u32 [%d9], %r8;
  ret;
}

.visible .entry hold(.param .u64 flag, .param .u64 limit)
{
  .reg .pred %p<3>;
  .reg .b32 %r<3>;
  .reg .b64 %d<5>;
  ld.param.u64 %d0, [flag];
  ld.param.u64 %d1, [limit];
  mov.u64 %d2, %globaltimer;
LOOP:
  ld.volatile.global.u32 %r0, [%d0];
  setp.ne.u32 %p0, %r0, 0;
  @%p0 bra DONE;
  mov.u64 %d3, %globaltimer;
  sub.u64 %d3, %d3, %d2;
  setp.lt.u64 %p1, %d3, %d1;
  @%p1 bra LOOP;
  mov.u32 %r1, 1;
  st.volatile.global.u32 [%d0+4], %r1;
DONE:
  ret;
}
)";

// Functions that only tests use: X(function of cuda.h, CUDA version of its signature)
#define GPUMEMX_LAB_FUNCTIONS(X)        \
  X(cuModuleLoadData, 2000)             \
  X(cuModuleGetFunction, 2000)          \
  X(cuLaunchKernel, 4000)               \
  X(cuStreamCreate, 2000)               \
  X(cuStreamDestroy, 4000)              \
  X(cuStreamSynchronize, 2000)          \
  X(cuStreamWaitEvent, 3020)            \
  X(cuStreamBeginCapture, 10010)        \
  X(cuStreamEndCapture, 10000)          \
  X(cuGraphInstantiateWithFlags, 11040) \
  X(cuGraphLaunch, 10000)               \
  X(cuGraphDestroy, 10000)              \
  X(cuGraphExecDestroy, 10000)          \
  X(cuMemsetD32Async, 3020)             \
  X(cuMemcpyDtoHAsync, 3020)            \
  X(cuMemHostAlloc, 2020)               \
  X(cuCtxSynchronize, 2000)

struct LabFunctions {
#define GPUMEMX_MEMBER(function, version) decltype(&::function) function = nullptr;
  GPUMEMX_LAB_FUNCTIONS(GPUMEMX_MEMBER)
#undef GPUMEMX_MEMBER
};

const char* load(LabFunctions& cu) {
#define GPUMEMX_LOAD(function, version)                                                          \
  cu.function = reinterpret_cast<decltype(cu.function)>(find_cuda_function(#function, version)); \
  if (cu.function == nullptr) return #function;
  GPUMEMX_LAB_FUNCTIONS(GPUMEMX_LOAD)
#undef GPUMEMX_LOAD
  return nullptr;
}

constexpr std::uint32_t kFactor = 0x9E3779B1;
constexpr std::uint32_t kSlots = 1u << 19;  // checks between two calls of wrong_words()
constexpr std::uint64_t kLongestHoldNs = 20'000'000'000;
constexpr std::size_t kFlags = 1024;

class Lab final : public CudaLab {
 public:
  Lab(std::unique_ptr<CudaDriver> driver, const LabFunctions& cu)
      : driver_(std::move(driver)), cu_(cu), entry_(cuda_entry_points().value()) {}

  // What is wrong, or "".
  std::string prepare() {
    expect(entry_.primary_retain(&context_, driver_->device()), "cuDevicePrimaryCtxRetain");
    enter();
    CUmodule module = nullptr;
    expect(cu_.cuModuleLoadData(&module, kKernels), "cuModuleLoadData");
    if (module != nullptr) {
      expect(cu_.cuModuleGetFunction(&fill_, module, "fill"), "cuModuleGetFunction");
      expect(cu_.cuModuleGetFunction(&check_, module, "check"), "cuModuleGetFunction");
      expect(cu_.cuModuleGetFunction(&hold_, module, "hold"), "cuModuleGetFunction");
    }
    expect(entry_.mem_alloc(&counters_, kSlots * 4), "cuMemAlloc");
    void* host = nullptr;
    expect(cu_.cuMemHostAlloc(&host, kSlots * 4, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
    found_ = static_cast<std::uint32_t*>(host);
    expect(
        cu_.cuMemHostAlloc(&host, kFlags * 8, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc");
    flags_ = static_cast<volatile std::uint32_t*>(host);
    if (!complaints().empty()) return complaints();
    for (std::size_t i = 0; i < 2 * kFlags; ++i) flags_[i] = 1;
    // Each kernel once: the first launch loads it, and loading may wait for what runs.
    const StreamRef stream = new_stream();
    const AddrRange range{{counters_}, {4096}};
    hold(stream);
    let_go();
    fill(stream, range, 0, {});
    check(stream, range, 0, {});
    set_words(stream, {{counters_}, {kSlots * 4}}, 0);
    synchronize(stream);
    next_slot_ = 0;
    checks_.clear();
    // A check that finds nothing would pass every test: plant a wrong word.
    const AddrRange last{{counters_ + 4096 * 100}, {4096}};
    fill(stream, last, 7, {});
    check(stream, last, 7, {});
    set_words(stream, {last.begin + 512_B, 8_B}, 1);
    check(stream, last, 7, {});
    const std::uint64_t planted = wrong_words();
    const std::string said = std::exchange(complaints_, {});
    if (planted != 2)
      return "the checking kernel finds " + std::to_string(planted) + " of 2 " + said;
    checked_ = 0;
    return "";
  }

  DeviceDriver& driver() override { return *driver_; }

  StreamRef new_stream() override {
    enter();
    const RelaxedCapture relaxed(*driver_);
    CUstream stream = nullptr;
    expect(cu_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    return named(reinterpret_cast<std::uintptr_t>(stream));
  }
  void destroy_stream(StreamRef stream) override {
    enter();
    const RelaxedCapture relaxed(*driver_);
    expect(cu_.cuStreamDestroy(native(stream)), "cuStreamDestroy");
  }
  StreamRef thread_stream() override {
    enter();
    return named(reinterpret_cast<std::uintptr_t>(CU_STREAM_PER_THREAD));
  }

  void fill(StreamRef stream, AddrRange range, std::uint32_t seed, microseconds delay) override {
    launch_fill(stream, range, kFactor, seed, delay);
  }
  void check(StreamRef stream, AddrRange range, std::uint32_t seed, microseconds delay) override {
    launch_check(stream, range, kFactor, seed, delay);
  }
  void set_words(StreamRef stream, AddrRange range, std::uint32_t word) override {
    enter();
    expect(cu_.cuMemsetD32Async(range.begin.n, word, range.size.n / 4, native(stream)),
           "cuMemsetD32Async");
  }
  void check_words(StreamRef stream, AddrRange range, std::uint32_t word) override {
    launch_check(stream, range, 0, word, {});
  }

  void order(StreamRef first, StreamRef later) override {
    enter();
    const RelaxedCapture relaxed(*driver_);
    CUevent event = nullptr;
    expect(entry_.event_create(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    expect(entry_.event_record(event, native(first)), "cuEventRecord");
    expect(cu_.cuStreamWaitEvent(native(later), event, 0), "cuStreamWaitEvent");
    expect(entry_.event_destroy(event), "cuEventDestroy");
  }

  void hold(StreamRef stream) override {
    enter();
    std::size_t at = 0;
    {
      const std::lock_guard lock(mu_);
      at = next_flag_++ % kFlags;
    }
    flags_[2 * at] = 0;
    flags_[2 * at + 1] = 0;
    auto flag = static_cast<CUdeviceptr>(
        reinterpret_cast<std::uintptr_t>(const_cast<std::uint32_t*>(&flags_[2 * at])));
    std::uint64_t limit = kLongestHoldNs;
    std::array<void*, 2> arguments{&flag, &limit};
    expect(
        cu_.cuLaunchKernel(hold_, 1, 1, 1, 1, 1, 1, 0, native(stream), arguments.data(), nullptr),
        "cuLaunchKernel(hold)");
  }
  void let_go() override {
    for (std::size_t i = 0; i < kFlags; ++i) flags_[2 * i] = 1;
  }
  bool was_overdue() const override {
    for (std::size_t i = 0; i < next_flag_ && i < kFlags; ++i) {
      if (flags_[2 * i + 1] != 0) return true;
    }
    return false;
  }

  void begin_capture(StreamRef stream) override {
    enter();
    expect(cu_.cuStreamBeginCapture(native(stream), CU_STREAM_CAPTURE_MODE_GLOBAL),
           "cuStreamBeginCapture");
  }
  std::optional<Graph> end_capture(StreamRef stream) override {
    enter();
    CUgraph graph = nullptr;
    const CUresult r = cu_.cuStreamEndCapture(native(stream), &graph);
    expect(r, "cuStreamEndCapture");
    if (r != CUDA_SUCCESS || graph == nullptr) return std::nullopt;
    CUgraphExec exec = nullptr;
    expect(cu_.cuGraphInstantiateWithFlags(&exec, graph, 0), "cuGraphInstantiate");
    expect(cu_.cuGraphDestroy(graph), "cuGraphDestroy");
    if (exec == nullptr) return std::nullopt;
    return Graph{reinterpret_cast<std::uintptr_t>(exec)};
  }
  void launch(Graph graph, StreamRef stream) override {
    enter();
    expect(cu_.cuGraphLaunch(as_exec(graph), native(stream)), "cuGraphLaunch");
  }
  void destroy(Graph graph) override {
    enter();
    expect(cu_.cuGraphExecDestroy(as_exec(graph)), "cuGraphExecDestroy");
  }

  void synchronize(StreamRef stream) override {
    enter();
    const RelaxedCapture relaxed(*driver_);  // another thread may be capturing
    expect(cu_.cuStreamSynchronize(native(stream)), "cuStreamSynchronize");
  }

  std::uint64_t wrong_words() override {
    enter();
    const RelaxedCapture relaxed(*driver_);
    expect(cu_.cuCtxSynchronize(), "cuCtxSynchronize");
    const std::uint32_t used = std::min(next_slot_, kSlots);
    if (used == 0) return 0;
    expect(cu_.cuMemcpyDtoHAsync(found_, counters_, used * 4ull, CU_STREAM_LEGACY),
           "cuMemcpyDtoHAsync");
    expect(cu_.cuMemsetD32Async(counters_, 0, used, CU_STREAM_LEGACY), "cuMemsetD32Async");
    expect(cu_.cuCtxSynchronize(), "cuCtxSynchronize");
    std::uint64_t wrong = 0;
    int told = 0;
    const std::lock_guard lock(mu_);
    for (std::uint32_t i = 0; i < used; ++i) {
      if (found_[i] == 0) continue;
      wrong += found_[i];
      if (told++ >= 10) continue;
      const Check& c = checks_[i];
      complaints_ += "check " + std::to_string(i) + " of " + std::to_string(used) + ", stream " +
                     std::to_string(static_cast<std::uint64_t>(c.stream)) + ", seed " +
                     std::to_string(c.seed) + ": " + std::to_string(found_[i]) + " of " +
                     std::to_string(c.words) + " words are wrong\n";
    }
    checks_.clear();
    next_slot_ = 0;
    return wrong;
  }
  std::string complaints() const override {
    const std::lock_guard lock(mu_);
    return complaints_;
  }
  std::uint64_t words_checked() const override {
    const std::lock_guard lock(mu_);
    return checked_;
  }

 private:
  struct Check {
    StreamId stream;
    std::uint32_t seed;
    std::uint64_t words;
  };

  static CUstream native(StreamRef stream) { return reinterpret_cast<CUstream>(stream.native); }
  static CUgraphExec as_exec(Graph graph) {
    return reinterpret_cast<CUgraphExec>(static_cast<std::uintptr_t>(graph));
  }

  // The suite's own calls need the context on this thread.
  void enter() {
    CUcontext current = nullptr;
    (void)entry_.context_get(&current);
    if (current != context_) expect(entry_.context_push(context_), "cuCtxPushCurrent");
  }

  StreamRef named(std::uintptr_t stream) {
    const Result<StreamId> id = driver_->stream_id(stream);
    if (!id.ok()) complain(id.error().where);
    return {id.ok() ? id.value() : StreamId{}, stream};
  }

  static unsigned blocks_for(
      std::uint64_t words) {  // few, so that kernels of several streams overlap
    return static_cast<unsigned>(std::clamp<std::uint64_t>(words / (256 * 16), 1, 128));
  }

  void launch_fill(StreamRef stream, AddrRange range, std::uint32_t factor, std::uint32_t seed,
                   microseconds delay) {
    enter();
    std::uint64_t words = range.size.n / 4;
    auto ns = static_cast<std::uint64_t>(delay.count()) * 1000;
    std::array<void*, 5> arguments{&range.begin.n, &words, &factor, &seed, &ns};
    expect(cu_.cuLaunchKernel(fill_, blocks_for(words), 1, 1, 256, 1, 1, 0, native(stream),
                              arguments.data(), nullptr),
           "cuLaunchKernel(fill)");
  }

  void launch_check(StreamRef stream, AddrRange range, std::uint32_t factor, std::uint32_t seed,
                    microseconds delay) {
    enter();
    std::uint64_t words = range.size.n / 4;
    std::uint32_t slot = 0;
    {
      const std::lock_guard lock(mu_);
      slot = next_slot_++;
      if (slot >= kSlots) {
        complaints_ += "more checks than there are counters\n";
        return;
      }
      checks_.push_back({stream.id, seed, words});
      checked_ += words;
    }
    auto ns = static_cast<std::uint64_t>(delay.count()) * 1000;
    CUdeviceptr counter = counters_ + slot * 4ull;
    std::array<void*, 6> arguments{&range.begin.n, &words, &factor, &seed, &ns, &counter};
    expect(cu_.cuLaunchKernel(check_, blocks_for(words), 1, 1, 256, 1, 1, 0, native(stream),
                              arguments.data(), nullptr),
           "cuLaunchKernel(check)");
  }

  void expect(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return;
    complain(std::string(call) + ": error " + std::to_string(static_cast<int>(result)));
  }
  void complain(const std::string& text) {
    const std::lock_guard lock(mu_);
    if (complaints_.size() < 4000) complaints_ += text + "\n";
  }

  const std::unique_ptr<CudaDriver> driver_;
  const LabFunctions cu_;
  const EntryPoints& entry_;
  CUcontext context_ = nullptr;
  CUfunction fill_ = nullptr;
  CUfunction check_ = nullptr;
  CUfunction hold_ = nullptr;
  CUdeviceptr counters_ = 0;
  std::uint32_t* found_ = nullptr;           // what the counters held
  volatile std::uint32_t* flags_ = nullptr;  // pairs: may go, was overdue

  mutable std::mutex mu_;  // guards what is below
  std::uint32_t next_slot_ = 0;
  std::size_t next_flag_ = 0;
  std::vector<Check> checks_;
  std::uint64_t checked_ = 0;
  std::string complaints_;
};

}  // namespace

CudaLab* CudaLab::open(std::string& why) {
  static std::string broken;
  // Kept for the process: the context, and the kernels in it.
  static CudaLab* const lab = []() -> CudaLab* {
    auto driver = CudaDriver::open(0);
    if (!driver.ok()) {
      broken = driver.error().where;
      return nullptr;
    }
    if (!driver.value()->traits().virtual_memory) {
      broken = "the device has no virtual memory";
      return nullptr;
    }
    LabFunctions cu;
    if (const char* missing = load(cu)) {
      broken = std::string("the CUDA driver has no ") + missing;
      return nullptr;
    }
    auto made = std::make_unique<Lab>(std::move(driver).take(), cu);
    broken = made->prepare();
    return broken.empty() ? made.release() : nullptr;
  }();
  why = broken;
  return lab;
}

}  // namespace gpumemx

#endif  // GPUMEMX_HAVE_CUDA_DRIVER
