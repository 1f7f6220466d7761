// SPDX-License-Identifier: BSD-3-Clause
//
// dlopen once, cuGetProcAddress for everything else.
#include "driver/cuda/entry_points.hpp"

#include <dlfcn.h>

#include <string>

namespace gpumemx {

namespace {

// Stream 0 means the legacy default stream, whatever the program was compiled for: it hands us the
// stream that it means by value.
constexpr cuuint64_t kFlags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;

// cuGetProcAddress itself, in the two forms that drivers have.
using LookUp = CUresult(CUDAAPI*)(const char*, void**, int, cuuint64_t,
                                  CUdriverProcAddressQueryResult*);
using OldLookUp = CUresult(CUDAAPI*)(const char*, void**, int, cuuint64_t);

struct Library {
  LookUp look_up = nullptr;         // CUDA 12.0
  OldLookUp old_look_up = nullptr;  // CUDA 11.3
};

Result<Library> open_library() {
  // Never closed: its functions are used until the process is gone.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Error{Errc::kUnsupported, {}, std::string("no CUDA driver: ") + (why ? why : "")};
  }
  Library found;
  found.look_up = reinterpret_cast<LookUp>(::dlsym(library, "cuGetProcAddress_v2"));
  found.old_look_up = reinterpret_cast<OldLookUp>(::dlsym(library, "cuGetProcAddress"));
  if (found.look_up == nullptr && found.old_look_up == nullptr) {
    return Error{Errc::kUnsupported, {}, "the CUDA driver is older than 11.3"};
  }
  return found;
}

const Result<Library>& library() {
  static const Result<Library> opened = open_library();
  return opened;
}

Result<EntryPoints> load() {
  if (!library().ok()) return library().error();
  EntryPoints cu;
  const char* missing = nullptr;
#define GPUMEMX_LOAD(member, function, name, version)                                   \
  cu.member = reinterpret_cast<decltype(cu.member)>(find_cuda_function(name, version)); \
  if (cu.member == nullptr && missing == nullptr) missing = name;
  GPUMEMX_CUDA_FUNCTIONS(GPUMEMX_LOAD)
#undef GPUMEMX_LOAD
  cu.stream_capture_info = reinterpret_cast<decltype(cu.stream_capture_info)>(
      find_cuda_function("cuStreamGetCaptureInfo", 10010));
  if (cu.stream_capture_info == nullptr && missing == nullptr) missing = "cuStreamGetCaptureInfo";
  if (missing != nullptr) {
    return Error{Errc::kUnsupported, {}, std::string("the CUDA driver has no ") + missing};
  }
  cu.stream_get_id =
      reinterpret_cast<decltype(cu.stream_get_id)>(find_cuda_function("cuStreamGetId", 12000));
  return cu;
}

}  // namespace

void* find_cuda_function(const char* name, int version) {
  const Library& cuda = library().value();
  void* function = nullptr;
  CUresult result = CUDA_SUCCESS;
  if (cuda.look_up != nullptr) {
    CUdriverProcAddressQueryResult status{};
    result = cuda.look_up(name, &function, version, kFlags, &status);
  } else {
    result = cuda.old_look_up(name, &function, version, kFlags);
  }
  return result == CUDA_SUCCESS ? function : nullptr;
}

const Result<EntryPoints>& cuda_entry_points() {
  static const Result<EntryPoints> loaded = load();
  return loaded;
}

}  // namespace gpumemx
