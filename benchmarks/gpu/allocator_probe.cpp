// SPDX-License-Identifier: BSD-3-Clause
//
// allocator_probe: what has to be timed in C++, so that Python's cost is not in it. It drives
// whichever CUDA allocator torch has, through torch's interface.
//
//   run            programs of allocations and frees, one a thread, over and over
//   foreign_frees  one thread allocates, another frees
//   time_allocations, allocation_times   how long each allocation of the whole process takes
//
// A program is what a recorded run is: op k >= 0 allocates into slot k, ~k frees what slot k holds.
// Stream index i of a program that begins at `first_stream` is torch's default stream where both are
// 0, else one of the 31 streams taken from torch's pool.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <dlfcn.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace gpumemx::bench {
namespace {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using Clock = std::chrono::steady_clock;

CUDAAllocator* torch_allocator() { return c10::cuda::CUDACachingAllocator::get(); }

double ns_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

// --- what is driven

constexpr std::size_t kStreams = 32;

struct TorchTarget {
  TorchTarget() : allocator(torch_allocator()) {
    streams[0] = c10::cuda::getDefaultCUDAStream(0).stream();
    for (std::size_t i = 1; i < kStreams; ++i) {
      streams[i] = c10::cuda::getStreamFromPool(false, 0).stream();
    }
  }
  static void enter_thread() { c10::cuda::set_device(0); }
  static void wait() { c10::cuda::device_synchronize(); }
  void* allocate(std::size_t size, std::size_t stream) const {
    return allocator->raw_alloc_with_stream(size, streams[stream]);
  }
  void free(void* block) const { allocator->raw_delete(block); }
  cudaStream_t stream(std::size_t index) const { return streams[index]; }

  CUDAAllocator* allocator;
  std::array<cudaStream_t, kStreams> streams{};
};

// No allocator at all: what the loop itself costs, and a try on a machine without a device.
struct NoTarget {
  static void enter_thread() {}
  static void wait() {}
  static void* allocate(std::size_t size, std::size_t stream) {
    return reinterpret_cast<void*>((size + stream) | 1);  // NOLINT: any address that is not null
  }
  static void free(void* block) { asm volatile("" : : "r"(block) : "memory"); }
  static cudaStream_t stream(std::size_t) { return nullptr; }
};

// --- contents

// fill leaves i x 0x9E3779B1 xor seed in word i; check counts the words that do not hold it. PTX,
// compiled by the driver: no device compiler is needed.
constexpr const char* kKernels = R"(
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(.param .u64 begin, .param .u64 words, .param .u32 seed)
{
  .reg .pred %p<1>;
  .reg .b32 %r<6>;
  .reg .b64 %d<6>;
  ld.param.u64 %d0, [begin];
  ld.param.u64 %d1, [words];
  ld.param.u32 %r0, [seed];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %d2, %r1, %r2;
  cvt.u64.u32 %d3, %r3;
  add.u64 %d2, %d2, %d3;
  mul.wide.u32 %d4, %r4, %r2;
LOOP:
  setp.ge.u64 %p0, %d2, %d1;
  @%p0 bra DONE;
  cvt.u32.u64 %r5, %d2;
  mul.lo.u32 %r5, %r5, 0x9E3779B1;
  xor.b32 %r5, %r5, %r0;
  shl.b64 %d5, %d2, 2;
  add.u64 %d5, %d5, %d0;
  st.global.u32 [%d5], %r5;
  add.u64 %d2, %d2, %d4;
  bra LOOP;
DONE:
  ret;
}

.visible .entry check(.param .u64 begin, .param .u64 words, .param .u32 seed, .param .u64 counter)
{
  .reg .pred %p<3>;
  .reg .b32 %r<8>;
  .reg .b64 %d<7>;
  ld.param.u64 %d0, [begin];
  ld.param.u64 %d1, [words];
  ld.param.u32 %r0, [seed];
  ld.param.u64 %d6, [counter];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %d2, %r1, %r2;
  cvt.u64.u32 %d3, %r3;
  add.u64 %d2, %d2, %d3;
  mul.wide.u32 %d4, %r4, %r2;
  mov.u32 %r7, 0;
LOOP:
  setp.ge.u64 %p0, %d2, %d1;
  @%p0 bra DONE;
  cvt.u32.u64 %r5, %d2;
  mul.lo.u32 %r5, %r5, 0x9E3779B1;
  xor.b32 %r5, %r5, %r0;
  shl.b64 %d5, %d2, 2;
  add.u64 %d5, %d5, %d0;
  ld.global.u32 %r6, [%d5];
  setp.ne.u32 %p1, %r5, %r6;
  @%p1 add.u32 %r7, %r7, 1;
  add.u64 %d2, %d2, %d4;
  bra LOOP;
DONE:
  setp.ne.u32 %p2, %r7, 0;
  @%p2 red.global.add.u32 [%d6], %r7;
  ret;
}
)";

class Contents {
 public:
  // REQUIRES: CUDA has started and device 0 is current.
  Contents() {
    void* cuda = ::dlopen("libcuda.so.1", RTLD_NOW);
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          cuda == nullptr ? nullptr : ::dlsym(cuda, name));
      if (function == nullptr) throw std::runtime_error(std::string("libcuda has no ") + name);
    };
    decltype(&cuModuleLoadData) load = nullptr;
    decltype(&cuModuleGetFunction) get = nullptr;
    find(load, "cuModuleLoadData");
    find(get, "cuModuleGetFunction");
    find(launch_, "cuLaunchKernel");
    CUmodule module = nullptr;
    expect(load(&module, kKernels), "cuModuleLoadData");
    expect(get(&fill_, module, "fill"), "cuModuleGetFunction");
    expect(get(&check_, module, "check"), "cuModuleGetFunction");
    // Not from the allocator that is looked at.
    C10_CUDA_CHECK(cudaMalloc(&counter_, sizeof(std::uint32_t)));
    C10_CUDA_CHECK(cudaMemset(counter_, 0, sizeof(std::uint32_t)));
    try_out();
  }

  void fill(void* block, std::size_t size, std::uint32_t seed, cudaStream_t stream) {
    std::size_t words = size / 4;
    if (words == 0) return;
    void* arguments[] = {&block, &words, &seed};
    expect(launch_(fill_, grid(words), 1, 1, 256, 1, 1, 0, stream, arguments, nullptr), "fill");
  }
  void check(void* block, std::size_t size, std::uint32_t seed, cudaStream_t stream) {
    std::size_t words = size / 4;
    if (words == 0) return;
    void* arguments[] = {&block, &words, &seed, &counter_};
    expect(launch_(check_, grid(words), 1, 1, 256, 1, 1, 0, stream, arguments, nullptr), "check");
    words_.fetch_add(words, std::memory_order_relaxed);
  }
  // Waits for the device. Of all checks so far; the count of wrong ones wraps at 2^32.
  std::tuple<std::uint64_t, std::uint32_t> checked_and_wrong() {
    c10::cuda::device_synchronize();
    std::uint32_t wrong = 0;
    C10_CUDA_CHECK(cudaMemcpy(&wrong, counter_, sizeof(wrong), cudaMemcpyDeviceToHost));
    return {words_.load(), wrong};
  }

 private:
  // A check that finds nothing is worth something only if it would.
  void try_out() {
    constexpr std::uint32_t kWords = 1000;
    void* block = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&block, kWords * 4));
    fill(block, kWords * 4, 1, nullptr);
    check(block, kWords * 4, 1, nullptr);
    const std::uint32_t right = std::get<1>(checked_and_wrong());
    check(block, kWords * 4, 2, nullptr);
    const std::uint32_t wrong = std::get<1>(checked_and_wrong());
    if (right != 0 || wrong != kWords) throw std::runtime_error("the check does not work");
    C10_CUDA_CHECK(cudaMemset(counter_, 0, sizeof(std::uint32_t)));
    C10_CUDA_CHECK(cudaFree(block));
    words_ = 0;
  }
  static unsigned grid(std::size_t words) {
    return static_cast<unsigned>(std::min<std::size_t>((words + 255) / 256, 1024));
  }
  static void expect(CUresult result, const char* what) {
    if (result == CUDA_SUCCESS) return;
    throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(result));
  }

  decltype(&cuLaunchKernel) launch_ = nullptr;
  CUfunction fill_ = nullptr, check_ = nullptr;
  void* counter_ = nullptr;
  std::atomic<std::uint64_t> words_{0};
};

// --- programs

template <class T>
using Column = py::array_t<T, py::array::c_style>;

struct Program {
  std::vector<std::int64_t> op, size;
  std::vector<std::uint8_t> stream;
  std::size_t slots = 0;
};

Program make_program(const Column<std::int64_t>& op, const Column<std::int64_t>& size,
                     const Column<std::int16_t>& stream, std::size_t slots,
                     std::size_t first_stream) {
  if (op.size() != size.size() || op.size() != stream.size()) {
    throw std::invalid_argument("the columns of a program are of one length");
  }
  Program program{.op{op.data(), op.data() + op.size()},
                  .size{size.data(), size.data() + size.size()},
                  .stream{},
                  .slots = slots};
  for (const std::int64_t k : program.op) {
    if (static_cast<std::size_t>(k < 0 ? ~k : k) >= slots) {
      throw std::invalid_argument("a program names a slot that it does not have");
    }
  }
  for (py::ssize_t i = 0; i < stream.size(); ++i) {
    const std::size_t index = first_stream + static_cast<std::size_t>(stream.data()[i]);
    program.stream.push_back(static_cast<std::uint8_t>(index % kStreams));
  }
  return program;
}

struct Moment {
  std::uint64_t gone, reserved;  // bytes: as the driver sees the device, and as the allocator says
};

Moment look() {
  std::size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto stats = torch_allocator()->getDeviceStats(0);
  return {total - free, static_cast<std::uint64_t>(stats.reserved_bytes[0].current)};
}

struct Pass {
  double ns = 0;  // of the whole program
  std::int64_t failed_at = -1;
  std::string error;
};

// One thread's state, kept from pass to pass.
template <class Target>
struct Runner {
  struct Block {
    void* address = nullptr;
    std::size_t size = 0;
    std::uint32_t seed = 0;
    std::uint8_t stream = 0;
  };

  Pass run() {
    Pass pass;
    const std::size_t events = program.op.size();
    std::size_t i = 0;
    const auto begin = Clock::now();
    try {
      for (; i < events; ++i) {
        const std::int64_t op = program.op[i];
        if (op >= 0) {
          live[static_cast<std::size_t>(op)].address =
              target.allocate(static_cast<std::size_t>(program.size[i]), program.stream[i]);
        } else {
          release(live[static_cast<std::size_t>(~op)]);
        }
      }
    } catch (const std::exception& error) {  // a c10::OutOfMemoryError, as a rule
      pass.failed_at = static_cast<std::int64_t>(i);
      pass.error = error.what();
    }
    pass.ns = ns_since(begin);
    return pass;
  }

  // The same with every byte written after its allocation and read before its free, and with a look
  // at the device before each of the events named (in order). Its time means nothing.
  Pass run_slowly(Contents* contents, const std::vector<std::int64_t>& look_at,
                  std::vector<Moment>& moments) {
    Pass pass;
    auto next_look = look_at.begin();
    std::size_t i = 0;
    try {
      for (; i < program.op.size(); ++i) {
        if (next_look != look_at.end() && *next_look == static_cast<std::int64_t>(i)) {
          moments.push_back(look());
          ++next_look;
        }
        const std::int64_t op = program.op[i];
        Block& block = live[static_cast<std::size_t>(op >= 0 ? op : ~op)];
        if (op >= 0) {
          block.size = static_cast<std::size_t>(program.size[i]);
          block.stream = program.stream[i];
          block.seed = ++seed;
          block.address = target.allocate(block.size, block.stream);
          if (contents != nullptr) {
            contents->fill(block.address, block.size, block.seed, target.stream(block.stream));
          }
        } else {
          check(contents, block);
          release(block);
        }
      }
    } catch (const std::exception& error) {
      pass.failed_at = static_cast<std::int64_t>(i);
      pass.error = error.what();
    }
    for (Block& block : live) check(contents, block);
    return pass;
  }

  void check(Contents* contents, const Block& block) {
    if (contents == nullptr || block.address == nullptr) return;
    contents->check(block.address, block.size, block.seed, target.stream(block.stream));
  }
  void release(Block& block) {
    if (block.address == nullptr) return;
    target.free(block.address);
    block.address = nullptr;
  }
  void release_all() {
    for (Block& block : live) release(block);
  }

  const Program& program;
  const Target& target;
  std::uint32_t seed = 0;
  std::vector<Block> live = std::vector<Block>(program.slots);
};

// Result [thread][pass]. All threads begin a pass together; what is live at its end is freed outside
// of the time.
template <class Target>
std::vector<std::vector<Pass>> run_passes(const std::vector<Program>& programs, int passes) {
  const Target target;
  std::vector<std::vector<Pass>> results(programs.size());
  std::barrier together(static_cast<std::ptrdiff_t>(programs.size()));
  const auto work = [&](std::size_t k) {
    Target::enter_thread();
    Runner<Target> runner{programs[k], target};
    for (int pass = 0; pass < passes; ++pass) {
      together.arrive_and_wait();
      results[k].push_back(runner.run());
      together.arrive_and_wait();
      runner.release_all();
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t k = 1; k < programs.size(); ++k) threads.emplace_back(work, k);
  work(0);
  for (std::thread& thread : threads) thread.join();
  Target::wait();
  return results;
}

struct Checked {
  std::string error;
  std::uint64_t words = 0;
  std::uint32_t wrong = 0;
  std::vector<Moment> moments;
};

// The first thread is the one that looks at the device.
Checked run_checked(const std::vector<Program>& programs, bool contents,
                    const std::vector<std::int64_t>& look_at) {
  const TorchTarget target;
  std::unique_ptr<Contents> kernels;
  if (contents) kernels = std::make_unique<Contents>();
  Checked result;
  std::vector<Runner<TorchTarget>> runners;
  for (const Program& program : programs) {
    const auto first_seed = static_cast<std::uint32_t>(runners.size()) << 26;
    runners.push_back({.program = program, .target = target, .seed = first_seed});
  }
  std::vector<Pass> passes(programs.size());
  const auto work = [&](std::size_t k) {
    TorchTarget::enter_thread();
    passes[k] = runners[k].run_slowly(kernels.get(), k == 0 ? look_at : std::vector<std::int64_t>{},
                                      result.moments);
  };
  std::vector<std::thread> threads;
  for (std::size_t k = 1; k < programs.size(); ++k) threads.emplace_back(work, k);
  work(0);
  for (std::thread& thread : threads) thread.join();
  for (const Pass& pass : passes) {
    if (result.error.empty()) result.error = pass.error;
  }
  if (kernels) std::tie(result.words, result.wrong) = kernels->checked_and_wrong();
  for (Runner<TorchTarget>& runner : runners) runner.release_all();
  return result;
}

// Nanoseconds a block from the first allocation to the last free, both threads at work. `depth`
// blocks may be on their way; the allocating thread uses stream 1.
template <class Target>
double foreign_frees(const std::vector<std::int64_t>& sizes, std::size_t count, std::size_t depth) {
  const Target target;
  std::vector<std::atomic<void*>> on_the_way(depth);
  std::atomic<bool> failed{false};
  std::barrier together(2);
  std::thread freeing([&] {
    Target::enter_thread();
    together.arrive_and_wait();
    for (std::size_t i = 0; i < count; ++i) {
      std::atomic<void*>& place = on_the_way[i % depth];
      void* block = nullptr;
      while ((block = place.load(std::memory_order_acquire)) == nullptr) {
        if (failed.load(std::memory_order_relaxed)) return;
      }
      place.store(nullptr, std::memory_order_release);
      target.free(block);
    }
  });
  Target::enter_thread();
  together.arrive_and_wait();
  const auto begin = Clock::now();
  try {
    for (std::size_t i = 0; i < count; ++i) {
      std::atomic<void*>& place = on_the_way[i % depth];
      void* block = target.allocate(static_cast<std::size_t>(sizes[i % sizes.size()]), 1);
      while (place.load(std::memory_order_acquire) != nullptr) {
      }
      place.store(block, std::memory_order_release);
    }
  } catch (...) {
    failed = true;
    freeing.join();
    throw;
  }
  freeing.join();
  return ns_since(begin) / static_cast<double>(count);
}

// --- the time of every allocation of a process

// The allocator's own virtual functions are replaced in its class's table by ones that take the time
// around them. So everything about it stays as it is (its type, its deleters, its other functions),
// and one source serves all versions of torch. Works where a pointer to a virtual function is 1 + its
// offset in the table, and an object's first word points to the table: the Itanium C++ ABI on x86-64.

constexpr std::size_t kMostTimes = std::size_t{1} << 22;
std::unique_ptr<std::uint32_t[]> times;  // ns
std::atomic<std::size_t> times_taken{0};

struct Stopwatch {
  Stopwatch() = default;
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {  // also when the allocation failed
    const double ns = ns_since(begin);
    const std::size_t index = times_taken.fetch_add(1, std::memory_order_relaxed);
    if (index < kMostTimes) times[index] = static_cast<std::uint32_t>(std::min(ns, 4e9));
  }
  Clock::time_point begin = Clock::now();
};

using Allocate = c10::DataPtr (*)(CUDAAllocator*, std::size_t);
using RawAlloc = void* (*)(CUDAAllocator*, std::size_t);
using RawAllocWithStream = void* (*)(CUDAAllocator*, std::size_t, cudaStream_t);
Allocate true_allocate;
RawAlloc true_raw_alloc;
RawAllocWithStream true_raw_alloc_with_stream;

c10::DataPtr timed_allocate(CUDAAllocator* self, std::size_t size) {
  const Stopwatch stopwatch;
  return true_allocate(self, size);
}
void* timed_raw_alloc(CUDAAllocator* self, std::size_t size) {
  const Stopwatch stopwatch;
  return true_raw_alloc(self, size);
}
void* timed_raw_alloc_with_stream(CUDAAllocator* self, std::size_t size, cudaStream_t stream) {
  const Stopwatch stopwatch;
  return true_raw_alloc_with_stream(self, size, stream);
}

template <class Member, class Function>
void replace_virtual(CUDAAllocator* object, Member member, Function replacement, Function& before) {
  std::uintptr_t offset = 0;
  std::memcpy(&offset, &member, sizeof(offset));
  char* table = nullptr;
  std::memcpy(&table, static_cast<const void*>(object), sizeof(table));
  char* slot = table + (offset - 1);
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  void* begin =
      reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot) & ~(page - 1));  // NOLINT
  // Stays writable: some tables share their page with data.
  if (::mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) {
    throw std::runtime_error("mprotect() refuses to make the allocator's table writable");
  }
  std::memcpy(&before, slot, sizeof(before));
  std::memcpy(slot, &replacement, sizeof(replacement));
}

void time_allocations() {
#if !defined(__x86_64__) || !defined(__linux__)
  throw std::runtime_error("allocations can be timed on Linux on x86-64 only");
#endif
  if (times) throw std::runtime_error("allocations are timed already");
  times = std::make_unique<std::uint32_t[]>(kMostTimes);
  CUDAAllocator* allocator = torch_allocator();
  replace_virtual(allocator, &CUDAAllocator::allocate, &timed_allocate, true_allocate);
  replace_virtual(allocator, &CUDAAllocator::raw_alloc, &timed_raw_alloc, true_raw_alloc);
  replace_virtual(allocator, &CUDAAllocator::raw_alloc_with_stream, &timed_raw_alloc_with_stream,
                  true_raw_alloc_with_stream);
}

py::array_t<std::uint32_t> allocation_times() {
  const std::size_t count = std::min(times_taken.load(), kMostTimes);
  return py::array_t<std::uint32_t>(static_cast<py::ssize_t>(count), times.get());
}

}  // namespace
}  // namespace gpumemx::bench

PYBIND11_MODULE(allocator_probe, m) {
  using namespace gpumemx::bench;  // NOLINT: this module is its only user
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.doc() = "Drives torch's CUDA allocator, whichever it is, from C++.";

  py::class_<Program>(m, "Program")
      .def(py::init(&make_program), py::arg("op"), py::arg("size"), py::arg("stream"),
           py::arg("slots"), py::arg("first_stream") = 0);
  py::class_<Pass>(m, "Pass")
      .def_readonly("ns", &Pass::ns)
      .def_readonly("failed_at", &Pass::failed_at)
      .def_readonly("error", &Pass::error);
  py::class_<Moment>(m, "Moment")
      .def_readonly("gone", &Moment::gone)
      .def_readonly("reserved", &Moment::reserved);
  py::class_<Checked>(m, "Checked")
      .def_readonly("error", &Checked::error)
      .def_readonly("words", &Checked::words)
      .def_readonly("wrong", &Checked::wrong)
      .def_readonly("moments", &Checked::moments);

  m.def("run", &run_passes<TorchTarget>, py::arg("programs"), py::arg("passes"), Unlocked(),
        "Run programs, one a thread; the Pass of each thread and pass.");
  m.def("run_nothing", &run_passes<NoTarget>, py::arg("programs"), py::arg("passes"), Unlocked(),
        "The same loop without an allocator.");
  m.def("run_checked", &run_checked, py::arg("programs"), py::arg("contents"), py::arg("look_at"),
        Unlocked(), "One pass with contents checked, and looks at the device before some events.");
  m.def("foreign_frees", &foreign_frees<TorchTarget>, py::arg("sizes"), py::arg("count"),
        py::arg("depth"), Unlocked(),
        "Nanoseconds a block that one thread allocates, another frees.");
  m.def("foreign_frees_of_nothing", &foreign_frees<NoTarget>, py::arg("sizes"), py::arg("count"),
        py::arg("depth"), Unlocked(), "The same loop without an allocator.");
  m.def("look", &look, "The device and the allocator now.");
  m.def("time_allocations", &time_allocations, "Take the time of all allocations from now on.");
  m.def("allocation_times", &allocation_times,
        "Nanoseconds of each since the last forget_times().");
  m.def("forget_times", [] { times_taken = 0; }, "Begin anew.");
}
