// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/ipc.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <torch/version.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace gpumemx::adapter {

namespace {

// No header tells; compared with each torch by tests/gpu/test_sharing.py.
constexpr char kVersion = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13 ? 3 : 2;
constexpr char kNewest = 3;  // that we read

constexpr char kDeviceAllocation = 'c';
constexpr char kHandles = 'e';
constexpr char kMixedHandles = 'g';

constexpr std::int32_t kDescriptors = 1;
constexpr std::int32_t kFabric = 2;

constexpr const char* kPlain =
    "Memory of ordinary device allocations needs no such rights: run the process that shares with "
    "GPUMEMX_CONF=mode:plain (or torch's own allocator with expandable_segments:False).";

class Writer {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    TORCH_CHECK(left() >= sizeof(T),
                "gpumemx: the handle of a shared CUDA tensor is cut off after ", bytes_.size(),
                " bytes");
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::size_t left() const { return bytes_.size() - at_; }

 private:
  const std::string& bytes_;
  std::size_t at_ = 0;
};

void put_header(Writer& out, Bytes handle_size, std::size_t handles, char version) {
  out.put(static_cast<std::int32_t>(::getpid()));
  out.put(std::int32_t{0});  // always the same bytes for the same memory: receivers look them up
  out.put(handle_size.n);
  out.put(static_cast<std::uint64_t>(handles));
  if (version < 3) return;
  out.put(kDescriptors);
  out.put(std::int32_t{0});
}

class Descriptor {
 public:
  explicit Descriptor(long fd) : fd_(static_cast<int>(fd)) {}
  ~Descriptor() {
    if (fd_ >= 0) (void)::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor& operator=(Descriptor&&) = delete;

  int get() const { return fd_; }

 private:
  int fd_;
};

// The two calls by number: the C library may be older than the kernel.
constexpr long kPidfdOpen = 434;
constexpr long kPidfdGetfd = 438;

[[noreturn]] void refuse_descriptor(int error, std::int32_t pid) {
  const std::string start = "gpumemx: can't take CUDA memory over from process " +
                            std::to_string(pid) + ": " + std::strerror(error) + ". ";
  switch (error) {
    case EPERM:
      TORCH_CHECK(
          false, start,
          "Descriptors of another process may be taken only with ptrace rights over it. In a "
          "container add --cap-add=SYS_PTRACE (Kubernetes: capabilities SYS_PTRACE), and where "
          "a seccomp profile forbids pidfd_getfd also --security-opt seccomp=unconfined; run "
          "both processes as the same user; with kernel.yama.ptrace_scope=1 the process that "
          "shares must be a child of the one that receives, or the setting 0. ",
          kPlain);
    case ESRCH:
      TORCH_CHECK(false, start,
                  "The process that shared the tensor has ended (it must live until the tensor was "
                  "received), or has another number here: containers must share a PID namespace.");
    case EBADF:
      TORCH_CHECK(
          false, start,
          "The tensor was freed before it was received: the process that shares it must keep it "
          "until then.");
    case EMFILE:
    case ENFILE:
      TORCH_CHECK(false, start, "Raise the limit of open files (ulimit -n) in this process.");
    case ENOSYS:
      TORCH_CHECK(false, start,
                  "This kernel is older than Linux 5.6, or a seccomp profile hides pidfd_getfd. ",
                  kPlain);
    default: TORCH_CHECK(false, start, kPlain);
  }
  std::abort();  // not reached
}

std::vector<Descriptor> take_descriptors(std::int32_t pid,
                                         const std::vector<std::int32_t>& theirs) {
  const Descriptor process(::syscall(kPidfdOpen, pid, 0));
  if (process.get() < 0) refuse_descriptor(errno, pid);
  std::vector<Descriptor> ours;
  for (const std::int32_t fd : theirs) {
    ours.emplace_back(::syscall(kPidfdGetfd, process.get(), fd, 0));
    if (ours.back().get() < 0) refuse_descriptor(errno, pid);
  }
  return ours;
}

std::string describe(const Error& error) {
  return error.where + " (" + to_string(error.code) + ")";
}

// Maps what an 'e' or 'g' string names. REQUIRES: version and type were read.
DeviceAddr import(Device& device, Reader& in, char version, char type) {
  const auto pid = in.get<std::int32_t>();
  (void)in.get<std::int32_t>();
  const auto handle_size = in.get<std::uint64_t>();
  const auto count = in.get<std::uint64_t>();
  std::int32_t kind = 0;
  if (version >= 3 || type == kMixedHandles) {
    kind = in.get<std::int32_t>();
    (void)in.get<std::int32_t>();
  } else {
    // Up to version 2 both sides had to be configured alike; the length tells.
    kind = count != 0 && in.left() / count >= sizeof(FabricHandle) ? kFabric : kDescriptors;
  }
  TORCH_CHECK(
      kind == kDescriptors || (kind == kFabric && type == kHandles),
      "gpumemx: a CUDA tensor was shared over handles of a kind that is not known here: ", kind);

  std::vector<ForeignHandle> handles;
  std::vector<std::int32_t> theirs;
  const std::size_t each = kind == kFabric         ? sizeof(FabricHandle)
                           : type == kMixedHandles ? 16
                                                   : sizeof(std::int32_t);
  TORCH_CHECK(count != 0 && in.left() % each == 0 && in.left() / each == count,
              "gpumemx: the handle of a shared CUDA tensor names ", count, " handles in ",
              in.left(), " bytes");
  for (std::uint64_t i = 0; i < count; ++i) {
    Bytes size{handle_size};
    if (type == kMixedHandles) size = {in.get<std::uint64_t>()};
    if (kind == kFabric) {
      handles.push_back({size, in.get<FabricHandle>()});
      continue;
    }
    theirs.push_back(in.get<std::int32_t>());
    if (type == kMixedHandles) (void)in.get<std::int32_t>();
    handles.push_back({size, -1});
  }
  std::vector<Descriptor> ours;  // kept until they are imported
  if (kind == kDescriptors) ours = take_descriptors(pid, theirs);
  for (std::size_t i = 0; i < ours.size(); ++i) handles[i].handle = ours[i].get();
  const auto address = device.allocator->import_memory(handles);
  TORCH_CHECK(address.ok(), "gpumemx: can't map CUDA memory shared by process ", pid, ": ",
              describe(address.error()));
  return address.value();
}

}  // namespace

c10::cuda::CUDACachingAllocator::ShareableHandle SharedMemory::share(Device& device,
                                                                     DeviceAddr address) {
  const auto shared = device.allocator->share(address);
  TORCH_CHECK(shared.ok(), "gpumemx: can't share this CUDA tensor with another process: ",
              describe(shared.error()),
              shared.error().code == Errc::kDriverFailure
                  ? ". Each handle takes a file descriptor: perhaps ulimit -n is too low"
                  : "");
  const SharedRange& range = shared.value();
  const auto offset = static_cast<std::ptrdiff_t>((address - range.range.begin).n);
  Writer out;
  out.put(kVersion);
  if (range.handles.empty()) {
    cudaIpcMemHandle_t handle;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): device memory
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(range.range.begin.n)));
    out.put(kDeviceAllocation);
    out.put(handle);
    return {offset, out.take()};
  }
  if (range.is_uniform()) {
    out.put(kHandles);
    put_header(out, range.handles.front().size, range.handles.size(), kVersion);
    for (const SharedHandle& h : range.handles) out.put(static_cast<std::int32_t>(h.descriptor));
    return {offset, out.take()};
  }
  TORCH_WARN_ONCE(
      "gpumemx: a CUDA tensor was shared over memory handles of several sizes, because tensors "
      "beside it "
      "are shared already. Only processes with gpumemx can receive it; with torch's own allocator "
      "they "
      "fail with an internal assert. Install gpumemx in those too, or share this tensor before its "
      "neighbours, or run this process with GPUMEMX_CONF=mode:plain.");
  out.put(kMixedHandles);
  put_header(out, {}, range.handles.size(), kNewest);
  for (const SharedHandle& h : range.handles) {
    out.put(h.size.n);
    out.put(static_cast<std::int32_t>(h.descriptor));
    out.put(std::int32_t{0});
  }
  return {offset, out.take()};
}

std::shared_ptr<void> SharedMemory::open(Device& device, const std::string& bytes) {
  const MutexLock lock(mu_);
  Opened& known = opened_[bytes];
  if (std::shared_ptr<void> open = known.memory.lock()) return open;
  // What is unmapped at this moment by the last holder, on another thread, is mapped anew.
  std::erase_if(opened_, [&](const auto& entry) {
    return entry.second.memory.expired() && &entry.second != &known;
  });

  Reader in(bytes);
  char version = kVersion;
  char type = kDeviceAllocation;
  if (bytes.size() != sizeof(cudaIpcMemHandle_t)) {
    version = in.get<char>();
    TORCH_CHECK(
        version > 0 && version <= kNewest,
        "received sharable handle from a future version of torch that this version does not "
        "know how to handle (gpumemx)");
    type = in.get<char>();
  }
  std::shared_ptr<void> memory;
  if (type == kDeviceAllocation) {
    const auto handle = in.get<cudaIpcMemHandle_t>();
    void* address = nullptr;
    C10_CUDA_CHECK(cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess));
    memory = std::shared_ptr<void>(address, [index = c10::cuda::current_device()](void* ptr) {
      if (DeviceRegistry::instance().is_shut_down()) return;
      const c10::cuda::CUDAGuard guard(index);
      if (cudaIpcCloseMemHandle(ptr) != cudaSuccess) (void)cudaGetLastError();  // nobody to tell
    });
  } else {
    TORCH_CHECK(type == kHandles || type == kMixedHandles,
                "gpumemx: the handle of a shared CUDA tensor has the unknown type ",
                static_cast<int>(type));
    const DeviceAddr address = import(device, in, version, type);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): device memory
    memory = std::shared_ptr<void>(reinterpret_cast<void*>(address.n), [&device, address](void*) {
      device.allocator->close_import(address);
    });
  }
  known = {memory, {reinterpret_cast<std::uintptr_t>(memory.get())}};
  return memory;
}

std::vector<DeviceAddr> SharedMemory::open_addresses() const {
  const MutexLock lock(mu_);
  std::vector<DeviceAddr> addresses;
  for (const auto& [bytes, opened] : opened_) {
    if (!opened.memory.expired()) addresses.push_back(opened.begin);
  }
  return addresses;
}

}  // namespace gpumemx::adapter
