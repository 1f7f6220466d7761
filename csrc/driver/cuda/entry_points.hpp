// SPDX-License-Identifier: BSD-3-Clause
//
// The CUDA driver, opened at run time: one binary serves machines with and without a GPU. Nothing
// links libcuda or libcudart. Each function is asked for by its name and the CUDA version that its
// signature is from, so that a newer driver hands out the one that this was compiled against.
#pragma once

#include <cuda.h>

#include "base/result.hpp"

namespace gpumemx {

// X(member, function of cuda.h, its name, CUDA version of the signature)
#define GPUMEMX_CUDA_FUNCTIONS(X)                                                                  \
  X(init, cuInit, "cuInit", 2000)                                                                  \
  X(get_error_name, cuGetErrorName, "cuGetErrorName", 6000)                                        \
  X(get_error_string, cuGetErrorString, "cuGetErrorString", 6000)                                  \
  X(device_get, cuDeviceGet, "cuDeviceGet", 2000)                                                  \
  X(device_get_attribute, cuDeviceGetAttribute, "cuDeviceGetAttribute", 2000)                      \
  X(primary_retain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000)                    \
  X(primary_release, cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 11000)                \
  X(context_get, cuCtxGetCurrent, "cuCtxGetCurrent", 4000)                                         \
  X(context_push, cuCtxPushCurrent, "cuCtxPushCurrent", 4000)                                      \
  X(context_pop, cuCtxPopCurrent, "cuCtxPopCurrent", 4000)                                         \
  X(mem_granularity, cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", 10020)        \
  X(mem_reserve, cuMemAddressReserve, "cuMemAddressReserve", 10020)                                \
  X(mem_unreserve, cuMemAddressFree, "cuMemAddressFree", 10020)                                    \
  X(mem_create, cuMemCreate, "cuMemCreate", 10020)                                                 \
  X(mem_release, cuMemRelease, "cuMemRelease", 10020)                                              \
  X(mem_map, cuMemMap, "cuMemMap", 10020)                                                          \
  X(mem_set_access, cuMemSetAccess, "cuMemSetAccess", 10020)                                       \
  X(mem_unmap, cuMemUnmap, "cuMemUnmap", 10020)                                                    \
  X(mem_export, cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020)               \
  X(mem_import, cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020)           \
  X(mem_alloc, cuMemAlloc, "cuMemAlloc", 3020)                                                     \
  X(mem_free, cuMemFree, "cuMemFree", 3020)                                                        \
  X(mem_get_info, cuMemGetInfo, "cuMemGetInfo", 3020)                                              \
  X(event_create, cuEventCreate, "cuEventCreate", 2000)                                            \
  X(event_destroy, cuEventDestroy, "cuEventDestroy", 4000)                                         \
  X(event_record, cuEventRecord, "cuEventRecord", 2000)                                            \
  X(event_query, cuEventQuery, "cuEventQuery", 2000)                                               \
  X(event_synchronize, cuEventSynchronize, "cuEventSynchronize", 2000)                             \
  X(stream_create, cuStreamCreate, "cuStreamCreate", 2000)                                         \
  X(stream_destroy, cuStreamDestroy, "cuStreamDestroy", 4000)                                      \
  X(stream_synchronize, cuStreamSynchronize, "cuStreamSynchronize", 2000)                          \
  X(launch_host, cuLaunchHostFunc, "cuLaunchHostFunc", 10000)                                      \
  X(context_synchronize, cuCtxSynchronize, "cuCtxSynchronize", 2000)                               \
  X(copy_on_device, cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync", 3020)                                  \
  X(stream_is_capturing, cuStreamIsCapturing, "cuStreamIsCapturing", 10000)                        \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", \
    10010)

struct EntryPoints {
#define GPUMEMX_MEMBER(member, function, name, version) decltype(&::function) member = nullptr;
  GPUMEMX_CUDA_FUNCTIONS(GPUMEMX_MEMBER)
#undef GPUMEMX_MEMBER
  decltype(&::cuStreamGetId) stream_get_id = nullptr;  // null before CUDA 12.0
  // cuStreamGetCaptureInfo as CUDA 10.1 had it: cuda.h names whichever came last.
  CUresult(CUDAAPI* stream_capture_info)(CUstream, CUstreamCaptureStatus*, cuuint64_t*) = nullptr;
};

// Opens the driver on the first call and keeps it for the life of the process.
// Fails: kUnsupported when there is no driver, or one older than the functions above (11.3).
const Result<EntryPoints>& cuda_entry_points();

// A function that is not in the table, or null. REQUIRES: cuda_entry_points() succeeded.
void* find_cuda_function(const char* name, int version);

}  // namespace gpumemx
