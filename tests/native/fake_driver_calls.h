// The table of the driver's calls over the double in fake_gpu.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fake_gpu.h"

namespace crossrail::test {

// The driver's calls that native/device/cuda.cc looks up, with their types.
struct FakeCalls {
  using Stream = FakeGpu::Stream;

  static int init(unsigned) { return 0; }
  static int error_string(int, const char** text) {
    *text = "a fake error";
    return 0;
  }
  static int device_count(int* count) {
    *count = 2;
    return 0;
  }
  static int device_name(char* name, int, int ordinal) {
    const char text[] = {'f', 'a', 'k', 'e', static_cast<char>('0' + ordinal), '\0'};
    std::copy(std::begin(text), std::end(text), name);
    return 0;
  }
  static int device_attribute(int* value, int attribute, int ordinal) {
    if (ordinal < 0 || ordinal > 1) return 101;  // cuda.h: CUDA_ERROR_INVALID_DEVICE
    return g_gpu->device_attribute(value, attribute, ordinal);
  }
  static int retain_context(void** context, int ordinal) {
    if (ordinal < 0 || ordinal > 1) return 101;  // cuda.h: CUDA_ERROR_INVALID_DEVICE
    *context = g_gpu->kernels.context(ordinal);
    return 0;
  }
  static int push_context(void* context) {
    ++FakeGpu::contexts_current;
    contexts_.push_back(std::exchange(FakeGpu::context_current, context));
    return 0;
  }
  static int pop_context(void** context) {
    --FakeGpu::contexts_current;
    *context = std::exchange(FakeGpu::context_current, contexts_.back());
    contexts_.pop_back();
    return 0;
  }
  static int pointer_attribute(void* value, int attribute, uint64_t address) {
    return g_gpu->pointer_attribute(value, attribute, address);
  }
  static int set_pointer_attribute(const void*, int, uint64_t) {
    g_gpu->kernels.forbidden_while_capturing();
    return 0;
  }
  static int create_stream(void** stream, unsigned flags) {
    if (FakeGpu::contexts_current != 1 || flags != 1) return 1;
    *stream = new Stream;
    ++g_gpu->streams_;
    return 0;
  }
  static int stream_priorities(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return FakeGpu::contexts_current == 1 ? 0 : 201;
  }
  static int create_stream_with_priority(void** stream, unsigned flags, int priority) {
    return priority == -5 ? create_stream(stream, flags) : 1;
  }
  static int destroy_stream(void* stream) {
    delete static_cast<Stream*>(stream);
    --g_gpu->streams_;
    return 0;
  }
  static int synchronize_stream(void* stream) { return g_gpu->synchronize(static_cast<Stream*>(stream)); }
  static int copy_async(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    return g_gpu->copy_async(to, from, bytes, static_cast<Stream*>(stream));
  }
  static int pin_host(void* base, size_t bytes, unsigned flags) {
    return g_gpu->pin(reinterpret_cast<uint64_t>(base), bytes, flags);
  }
  static int unpin_host(void* base) {
    g_gpu->kernels.unpinned(reinterpret_cast<uint64_t>(base));
    return g_gpu->set_pinned(reinterpret_cast<uint64_t>(base), false);
  }
  static int allocate(uint64_t* address, size_t bytes) {
    g_gpu->kernels.forbidden_while_capturing();
    if (FakeGpu::contexts_current != 1 || g_gpu->allocate_error != 0) return g_gpu->allocate_error | 1;
    ++g_gpu->allocated_;
    *address = reinterpret_cast<uint64_t>(g_gpu->allocate(bytes, current_gpu()));
    return 0;
  }
  static int free(uint64_t address) {
    g_gpu->kernels.forbidden_while_capturing();
    if (FakeGpu::contexts_current != 1) return 1;
    --g_gpu->allocated_;
    g_gpu->free(reinterpret_cast<std::byte*>(address));  // NOLINT(performance-no-int-to-ptr)
    return 0;
  }
  static int export_range(void* handle, uint64_t address, size_t bytes, int, unsigned long long) {
    return g_gpu->export_range(static_cast<int*>(handle), address, bytes);
  }
  static int flush_writes(int, int) {
    g_gpu->kernels.forbidden_while_capturing();
    if (FakeGpu::contexts_current != 1) return 1;
    ++g_gpu->flushes;
    return g_gpu->flush_error;
  }
  // Handle: CUipcMemHandle, 64 bytes.
  template <typename Handle>
  static int get_ipc_handle(Handle* handle, uint64_t address) {
    static_assert(sizeof(Handle) == 64);
    g_gpu->kernels.forbidden_while_capturing();
    return g_gpu->get_ipc_handle(handle, address);
  }
  template <typename Handle>
  static int open_ipc_handle(uint64_t* address, Handle handle, unsigned flags) {
    g_gpu->kernels.forbidden_while_capturing();
    return flags == 1 ? g_gpu->open_ipc_handle(address, &handle) : 1;
  }
  static int close_ipc_handle(uint64_t address) {
    g_gpu->kernels.forbidden_while_capturing();
    return g_gpu->close_ipc_handle(address);
  }

  // --- virtual memory management. Properties: CUmemAllocationProp; Access: CUmemAccessDesc.
  template <typename Properties>
  static int create_memory(uint64_t* handle, size_t bytes, const Properties* wanted, unsigned long long flags) {
    if (!may_manage() || wanted->type != 1 || wanted->location.type != 1 || flags != 0) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->vmm.create(handle, bytes, wanted->location.id, wanted->handle_types == 1);
  }
  static int release_memory(uint64_t handle) {
    if (!may_manage()) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->vmm.release(handle);
  }
  static int reserve_addresses(uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted,
                               unsigned long long flags) {
    if (!may_manage() || alignment != 0 || wanted != 0 || flags != 0) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->vmm.reserve(address, bytes);
  }
  static int free_addresses(uint64_t address, size_t bytes) {
    if (!may_manage()) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    if (g_gpu->find(address) != g_gpu->allocations_.end()) return 1;
    return g_gpu->vmm.give_back(address, bytes);
  }
  static int map_memory(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    if (!may_manage() || offset != 0 || flags != 0) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->map_physical(address, bytes, handle);
  }
  static int unmap_memory(uint64_t address, size_t bytes) {
    if (!may_manage()) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->unmap_physical(address, bytes);
  }
  template <typename Access>
  static int set_access(uint64_t address, size_t bytes, const Access* wanted, size_t count) {
    if (!may_manage() || count != 1 || wanted->location.type != 1 || wanted->flags != 3) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->set_access(address, bytes, wanted->location.id);
  }
  static int memory_granularity(size_t* bytes, const void*, int kind) {
    *bytes = FakeVmm::kUnit;
    return kind == 0 ? 0 : 1;
  }
  static int export_memory(void* fd, uint64_t handle, int kind, unsigned long long flags) {
    if (!may_manage() || kind != 1 || flags != 0) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->vmm.share(static_cast<int*>(fd), handle);
  }
  static int import_memory(uint64_t* handle, void* fd, int kind) {
    if (!may_manage() || kind != 1) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    return g_gpu->vmm.import(handle, static_cast<int>(reinterpret_cast<intptr_t>(fd)));
  }
  static int retain_memory(uint64_t* handle, void* address) {
    if (!may_manage()) return 1;
    const std::lock_guard lock(g_gpu->mutex_);
    const auto it = g_gpu->find(reinterpret_cast<uint64_t>(address));
    if (it == g_gpu->allocations_.end() || it->second.handle == 0) return 1;
    *handle = it->second.handle;
    return g_gpu->vmm.retain(*handle);
  }
  static int can_access_peer(int* can, int device, int owner) {
    *can = device != g_gpu->out_of_reach && owner != g_gpu->out_of_reach;
    return 0;
  }
  static int fill_async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
    if (!may_manage() || value != 0) return 1;
    static_cast<Stream*>(stream)->begun.push_back({address, 0, bytes});
    return 0;
  }
  static int synchronize_context() {
    if (FakeGpu::contexts_current != 1) return 201;
    if (g_gpu->kernels.is_capturing()) return 900;
    while (g_gpu->kernels_run) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  }

  static int exchange_capture_mode(int* mode) { return FakeKernels::exchange_capture_mode(mode); }
  static int load_module(void** module, const void* image) {
    return g_gpu->kernels.load(module, static_cast<const char*>(image), current_gpu());
  }
  static int module_function(void** function, void* module, const char* name) {
    return FakeKernels::function(function, module, name);
  }
  static int launch_kernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned, void* stream, void** arguments, void**) {
    FakeKernels& kernels = g_gpu->kernels;
    if (FakeKernels::copies(function)) {
      if (grid_x == 0 || grid_y == 0 || grid_z != 1 || kernels.launch_error != 0) return 1;
      return g_gpu->copy_pieces(static_cast<const uint64_t*>(arguments[0]), grid_x, static_cast<Stream*>(stream));
    }
    if ((grid_x | grid_y | grid_z | block_y | block_z) != 1 || block_x != FakeKernels::threads(function)) return 1;
    auto* const given = stream == nullptr ? kernels.default_stream(current_gpu()) : static_cast<UserStream*>(stream);
    return kernels.launch(function, given, arguments, current_gpu());
  }
  static int pinned_address(uint64_t* address, void* host, unsigned) {
    return current_gpu() < 0 ? 201 : g_gpu->kernels.address_of(reinterpret_cast<uint64_t>(host), address);
  }
  static int context_device(int* ordinal) {
    *ordinal = current_gpu();
    return *ordinal < 0 ? 201 : 0;
  }
  static int stream_context(void* stream, void** context) {
    *context =
        stream == nullptr ? FakeGpu::context_current : g_gpu->kernels.context_of(static_cast<UserStream*>(stream));
    return *context == nullptr ? 201 : 0;
  }

 private:
  using UserStream = FakeKernels::Stream;
  static bool may_manage() {
    g_gpu->kernels.forbidden_while_capturing();
    return FakeGpu::contexts_current == 1 && g_gpu->vmm.has_vmm;
  }
  static int current_gpu() { return g_gpu->kernels.gpu_of(FakeGpu::context_current); }
  static inline thread_local std::vector<void*> contexts_;
};

}  // namespace crossrail::test
