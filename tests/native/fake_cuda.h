// The double of NVIDIA's driver (fake_gpu.h), instead of which the core looks for none while this is there.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>

#include "device/cuda.h"
#include "fake_driver_calls.h"

namespace crossrail::test {

class FakeCuda : public FakeGpu {
 public:
  // is_old: a driver before virtual memory management, and before priorities of streams.
  explicit FakeCuda(bool is_old = false) {
    static const device::Driver table = {
        .init = FakeCalls::init,
        .error_string = FakeCalls::error_string,
        .device_count = FakeCalls::device_count,
        .device_name = FakeCalls::device_name,
        .device_attribute = FakeCalls::device_attribute,
        .retain_context = FakeCalls::retain_context,
        .push_context = FakeCalls::push_context,
        .pop_context = FakeCalls::pop_context,
        .pointer_attribute = FakeCalls::pointer_attribute,
        .set_pointer_attribute = FakeCalls::set_pointer_attribute,
        .create_stream = FakeCalls::create_stream,
        .destroy_stream = FakeCalls::destroy_stream,
        .synchronize_stream = FakeCalls::synchronize_stream,
        .copy_async = FakeCalls::copy_async,
        .pin_host = FakeCalls::pin_host,
        .unpin_host = FakeCalls::unpin_host,
        .allocate = FakeCalls::allocate,
        .free = FakeCalls::free,
        .export_range = FakeCalls::export_range,
        .flush_writes = FakeCalls::flush_writes,
        .exchange_capture_mode = FakeCalls::exchange_capture_mode,
        .get_ipc_handle = FakeCalls::get_ipc_handle<device::IpcHandle>,
        .open_ipc_handle = FakeCalls::open_ipc_handle<device::IpcHandle>,
        .close_ipc_handle = FakeCalls::close_ipc_handle,
        .load_module = FakeCalls::load_module,
        .module_function = FakeCalls::module_function,
        .launch_kernel = FakeCalls::launch_kernel,
        .pinned_address = FakeCalls::pinned_address,
        .context_device = FakeCalls::context_device,
        .stream_context = FakeCalls::stream_context,
        .create_stream_with_priority = FakeCalls::create_stream_with_priority,
        .stream_priorities = FakeCalls::stream_priorities,
        .create_memory = FakeCalls::create_memory<device::MemoryProperties>,
        .release_memory = FakeCalls::release_memory,
        .reserve_addresses = FakeCalls::reserve_addresses,
        .free_addresses = FakeCalls::free_addresses,
        .map_memory = FakeCalls::map_memory,
        .unmap_memory = FakeCalls::unmap_memory,
        .set_access = FakeCalls::set_access<device::MemoryAccess>,
        .memory_granularity = [](size_t* bytes, const device::MemoryProperties* wanted,
                                 int kind) { return FakeCalls::memory_granularity(bytes, wanted, kind); },
        .export_memory = FakeCalls::export_memory,
        .import_memory = FakeCalls::import_memory,
        .retain_memory = FakeCalls::retain_memory,
        .can_access_peer = FakeCalls::can_access_peer,
        .fill_async = FakeCalls::fill_async,
        .synchronize_context = FakeCalls::synchronize_context,
    };
    static const device::Driver old = [] {
      device::Driver without{};
      std::memcpy(&without, &table, offsetof(device::Driver, create_stream_with_priority));
      return without;
    }();
    device::replace_driver(is_old ? &old : &table);
  }
  ~FakeCuda() {
    CHECK(pinned() == 0);
    CHECK(streams() == 0);
    CHECK(allocated() == 0);
    CHECK(imports() == 0);
    CHECK(mappings() == 0);
    CHECK(handles() == 0);
    device::replace_driver(nullptr);
  }
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;
};

}  // namespace crossrail::test
