// libcuda.so.1, the double of NVIDIA's driver for Python's tests (tests/support/fake_gpu.py): the calls that the core
// looks up, and what a test asks of its GPU. In no wheel: tests/native/CMakeLists.txt builds it for developers.
#include "fake_driver_calls.h"

namespace crossrail::test {
namespace {

// Never destroyed: engines may be closed, and streams with them, when a process ends.
FakeGpu& gpu() {
  static FakeGpu* const one = new FakeGpu;
  return *one;
}

std::byte* pointer(uint64_t address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace
}  // namespace crossrail::test

using crossrail::test::FakeCalls;
using crossrail::test::FakeKernels;
using crossrail::test::gpu;
using crossrail::test::pointer;

#define CROSSRAIL_CALL extern "C" __attribute__((visibility("default")))

// --- the driver ---

CROSSRAIL_CALL int cuInit(unsigned flags) {
  gpu();
  return FakeCalls::init(flags);
}
CROSSRAIL_CALL int cuGetErrorString(int code, const char** text) { return FakeCalls::error_string(code, text); }
CROSSRAIL_CALL int cuDeviceGetCount(int* count) { return FakeCalls::device_count(count); }
CROSSRAIL_CALL int cuDeviceGetName(char* name, int bytes, int device) {
  return FakeCalls::device_name(name, bytes, device);
}
CROSSRAIL_CALL int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return FakeCalls::device_attribute(value, attribute, device);
}
CROSSRAIL_CALL int cuDevicePrimaryCtxRetain(void** context, int device) {
  return FakeCalls::retain_context(context, device);
}
CROSSRAIL_CALL int cuCtxPushCurrent_v2(void* context) { return FakeCalls::push_context(context); }
CROSSRAIL_CALL int cuCtxPopCurrent_v2(void** context) { return FakeCalls::pop_context(context); }
CROSSRAIL_CALL int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  return FakeCalls::pointer_attribute(value, attribute, address);
}
CROSSRAIL_CALL int cuPointerSetAttribute(const void* value, int attribute, uint64_t address) {
  return FakeCalls::set_pointer_attribute(value, attribute, address);
}
CROSSRAIL_CALL int cuStreamCreate(void** stream, unsigned flags) { return FakeCalls::create_stream(stream, flags); }
CROSSRAIL_CALL int cuStreamDestroy_v2(void* stream) { return FakeCalls::destroy_stream(stream); }
CROSSRAIL_CALL int cuStreamSynchronize(void* stream) { return FakeCalls::synchronize_stream(stream); }
CROSSRAIL_CALL int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return FakeCalls::copy_async(to, from, bytes, stream);
}
CROSSRAIL_CALL int cuMemHostRegister_v2(void* base, size_t bytes, unsigned flags) {
  return FakeCalls::pin_host(base, bytes, flags);
}
CROSSRAIL_CALL int cuMemHostUnregister(void* base) { return FakeCalls::unpin_host(base); }
CROSSRAIL_CALL int cuMemAlloc_v2(uint64_t* address, size_t bytes) { return FakeCalls::allocate(address, bytes); }
CROSSRAIL_CALL int cuMemFree_v2(uint64_t address) { return FakeCalls::free(address); }
CROSSRAIL_CALL int cuMemGetHandleForAddressRange(void* handle, uint64_t address, size_t bytes, int kind,
                                                 unsigned long long flags) {
  return FakeCalls::export_range(handle, address, bytes, kind, flags);
}
CROSSRAIL_CALL int cuFlushGPUDirectRDMAWrites(int target, int scope) { return FakeCalls::flush_writes(target, scope); }
struct CUipcMemHandle {
  char bytes[64];
};
CROSSRAIL_CALL int cuIpcGetMemHandle(CUipcMemHandle* handle, uint64_t address) {
  return FakeCalls::get_ipc_handle(handle, address);
}
CROSSRAIL_CALL int cuIpcOpenMemHandle_v2(uint64_t* address, CUipcMemHandle handle, unsigned flags) {
  return FakeCalls::open_ipc_handle(address, handle, flags);
}
CROSSRAIL_CALL int cuIpcCloseMemHandle(uint64_t address) { return FakeCalls::close_ipc_handle(address); }
CROSSRAIL_CALL int cuThreadExchangeStreamCaptureMode(int* mode) { return FakeCalls::exchange_capture_mode(mode); }
CROSSRAIL_CALL int cuModuleLoadData(void** module, const void* image) { return FakeCalls::load_module(module, image); }
CROSSRAIL_CALL int cuModuleGetFunction(void** function, void* module, const char* name) {
  return FakeCalls::module_function(function, module, name);
}
CROSSRAIL_CALL int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                  unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                                  void** arguments, void** extra) {
  return FakeCalls::launch_kernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                                  arguments, extra);
}
CROSSRAIL_CALL int cuMemHostGetDevicePointer_v2(uint64_t* address, void* pinned, unsigned flags) {
  return FakeCalls::pinned_address(address, pinned, flags);
}
CROSSRAIL_CALL int cuCtxGetDevice(int* device) { return FakeCalls::context_device(device); }
CROSSRAIL_CALL int cuStreamGetCtx(void* stream, void** context) { return FakeCalls::stream_context(stream, context); }

CROSSRAIL_CALL int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return FakeCalls::create_stream_with_priority(stream, flags, priority);
}
CROSSRAIL_CALL int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return FakeCalls::stream_priorities(least, greatest);
}

// --- virtual memory management ---

struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int handle_types;
  CUmemLocation location;
  void* win32_meta_data;
  unsigned char compression_type;
  unsigned char gpu_direct_rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
CROSSRAIL_CALL int cuMemCreate(uint64_t* handle, size_t bytes, const CUmemAllocationProp* wanted,
                               unsigned long long flags) {
  return FakeCalls::create_memory(handle, bytes, wanted, flags);
}
CROSSRAIL_CALL int cuMemRelease(uint64_t handle) { return FakeCalls::release_memory(handle); }
CROSSRAIL_CALL int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted,
                                       unsigned long long flags) {
  return FakeCalls::reserve_addresses(address, bytes, alignment, wanted, flags);
}
CROSSRAIL_CALL int cuMemAddressFree(uint64_t address, size_t bytes) {
  return FakeCalls::free_addresses(address, bytes);
}
CROSSRAIL_CALL int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
  return FakeCalls::map_memory(address, bytes, offset, handle, flags);
}
CROSSRAIL_CALL int cuMemUnmap(uint64_t address, size_t bytes) { return FakeCalls::unmap_memory(address, bytes); }
CROSSRAIL_CALL int cuMemSetAccess(uint64_t address, size_t bytes, const CUmemAccessDesc* wanted, size_t count) {
  return FakeCalls::set_access(address, bytes, wanted, count);
}
CROSSRAIL_CALL int cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* wanted, int kind) {
  return FakeCalls::memory_granularity(bytes, wanted, kind);
}
CROSSRAIL_CALL int cuMemExportToShareableHandle(void* fd, uint64_t handle, int kind, unsigned long long flags) {
  return FakeCalls::export_memory(fd, handle, kind, flags);
}
CROSSRAIL_CALL int cuMemImportFromShareableHandle(uint64_t* handle, void* fd, int kind) {
  return FakeCalls::import_memory(handle, fd, kind);
}
CROSSRAIL_CALL int cuMemRetainAllocationHandle(uint64_t* handle, void* address) {
  return FakeCalls::retain_memory(handle, address);
}
CROSSRAIL_CALL int cuDeviceCanAccessPeer(int* can, int device, int owner) {
  return FakeCalls::can_access_peer(can, device, owner);
}
CROSSRAIL_CALL int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  return FakeCalls::fill_async(address, value, bytes, stream);
}
CROSSRAIL_CALL int cuCtxSynchronize() { return FakeCalls::synchronize_context(); }

// --- what a test asks ---

CROSSRAIL_CALL uint64_t fake_allocate(uint64_t bytes, int ordinal) {
  return reinterpret_cast<uint64_t>(gpu().allocate(bytes, ordinal));
}
CROSSRAIL_CALL void fake_free(uint64_t address) { gpu().free(pointer(address)); }
CROSSRAIL_CALL uint64_t fake_bytes_at(uint64_t address) {
  return reinterpret_cast<uint64_t>(gpu().bytes_at(pointer(address)));
}
CROSSRAIL_CALL uint64_t fake_copies() { return gpu().copies; }
CROSSRAIL_CALL uint64_t fake_waits() { return gpu().waits; }
CROSSRAIL_CALL uint64_t fake_pinned() { return gpu().pinned(); }
CROSSRAIL_CALL uint64_t fake_imports() { return gpu().imports(); }
CROSSRAIL_CALL void fake_fail_ipc(int code) { gpu().ipc_error = code; }
CROSSRAIL_CALL int fake_streams() { return gpu().streams(); }
// The next waits for a stream go well, so many of them; those after them fail with `code`, until it is 0.
CROSSRAIL_CALL void fake_fail_copies(int code, uint32_t good) {
  gpu().copies_good = good;
  gpu().copy_error = code;
}
CROSSRAIL_CALL uint64_t fake_allocate_segments(uint64_t count, int is_shareable) {
  return reinterpret_cast<uint64_t>(gpu().allocate_segments(count, is_shareable != 0));
}
CROSSRAIL_CALL void fake_free_segments(uint64_t address) { gpu().free_segments(pointer(address)); }
CROSSRAIL_CALL uint64_t fake_mappings() { return gpu().mappings(); }
CROSSRAIL_CALL uint64_t fake_handles() { return gpu().handles(); }
CROSSRAIL_CALL void fake_set_vmm(int has_vmm, int gives_fds) {
  gpu().vmm.has_vmm = has_vmm != 0;
  gpu().vmm.gives_fds = gives_fds != 0;
}
// CUDA errors of the calls that create, export and import physical memory; 0: none.
CROSSRAIL_CALL void fake_fail_vmm(int create_error, int export_error, int import_error) {
  gpu().vmm.create_error = create_error;
  gpu().vmm.export_error = export_error;
  gpu().vmm.import_error = import_error;
}
CROSSRAIL_CALL void fake_put_out_of_reach(int ordinal) { gpu().out_of_reach = ordinal; }
CROSSRAIL_CALL void fake_run_kernels(int do_run) { gpu().kernels_run = do_run != 0; }

// Streams of the user's: tests/support/gpu_stream.py.
CROSSRAIL_CALL FakeKernels::Stream* fake_make_stream(int gpu) { return new FakeKernels::Stream{.gpu = gpu}; }
CROSSRAIL_CALL void fake_end_stream(FakeKernels::Stream* stream) { delete stream; }
CROSSRAIL_CALL int fake_take_launch(FakeKernels::Stream* stream, FakeKernels::Launch* launch) {
  return gpu().kernels.take(stream, launch);
}
CROSSRAIL_CALL int fake_run_launch(const FakeKernels::Launch* launch) { return gpu().kernels.run(*launch); }
CROSSRAIL_CALL void fake_begin_capture() { gpu().kernels.begin_capture(); }
CROSSRAIL_CALL int fake_end_capture() { return gpu().kernels.end_capture(); }
// CUDA errors of the calls that pin and that launch; 0: none.
CROSSRAIL_CALL void fake_refuse_kernels(int pin_error, int launch_error) {
  gpu().kernels.pin_error = pin_error;
  gpu().kernels.launch_error = launch_error;
}
