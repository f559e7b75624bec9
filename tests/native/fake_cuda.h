// A double of NVIDIA's driver: "memory of a GPU" is an address that every touch of the CPU's faults at, and the dma-buf
// of it is what a double of a NIC reaches the same bytes by. So who touches such memory by the CPU ends the test. Copies
// happen when their stream is waited for, not before. Calls may come from any thread.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "device/cuda.h"

namespace crossrail::test {

class FakeCuda;
inline FakeCuda* g_cuda = nullptr;  // one at a time: the driver's calls carry no handle

class FakeCuda {
 public:
  // What devices and drivers differ in.
  bool exports_dma_buf = true;
  bool is_managed = false;
  int writes_ordering = 100;  // 0: what NICs write has to be flushed
  int flush_options = 1;      // 0: by nobody but streams
  int export_error = 0;
  int flush_error = 0;
  std::atomic<int> copy_error{0};          // of the wait for a stream
  std::atomic<uint32_t> copies_good{~0u};  // so many go well before copy_error

  // What was done.
  uint32_t flushes = 0;
  uint32_t exports = 0;
  std::atomic<uint64_t> copies{0};
  std::atomic<uint64_t> waits{0};
  static inline thread_local int contexts_current = 0;

  FakeCuda();
  ~FakeCuda() {
    CHECK(pinned_.empty());
    CHECK(streams_ == 0);
    device::replace_driver(nullptr);
    g_cuda = nullptr;
    for (const auto& [address, allocation] : allocations_) {
      ::munmap(reinterpret_cast<void*>(address), allocation.bytes);  // NOLINT(performance-no-int-to-ptr)
      ::munmap(allocation.bar, allocation.bytes);
      ::close(allocation.file);
    }
  }
  FakeCuda(const FakeCuda&) = delete;
  FakeCuda& operator=(const FakeCuda&) = delete;

  // Of that GPU. bytes: whole pages.
  std::byte* allocate(uint64_t bytes, int ordinal = 0) {
    const int file = ::memfd_create("gpu", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
    void* const address = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* const bar = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (address == MAP_FAILED || bar == MAP_FAILED) std::abort();
    const std::lock_guard lock(mutex_);
    allocations_[reinterpret_cast<uint64_t>(address)] = {bytes, static_cast<std::byte*>(bar), file, ordinal};
    return static_cast<std::byte*>(address);
  }
  // The bytes at an address of the GPU, as its kernels see them.
  std::byte* bytes_at(const std::byte* address) {
    const std::lock_guard lock(mutex_);
    const auto it = find(reinterpret_cast<uint64_t>(address));
    return it->second.bar + (reinterpret_cast<uint64_t>(address) - it->first);
  }
  // What a NIC reaches by a dma-buf.
  std::byte* reach(int fd, uint64_t offset, uint64_t) { return shared_.at(fd) + offset; }

 private:
  struct Allocation {
    uint64_t bytes;
    std::byte* bar;
    int file;
    int ordinal;
  };
  using Allocations = std::map<uint64_t, Allocation>;

  Allocations::iterator find(uint64_t address) {
    auto it = allocations_.upper_bound(address);
    if (it == allocations_.begin()) return allocations_.end();
    --it;
    return address < it->first + it->second.bytes ? it : allocations_.end();
  }
  struct Stream {
    struct Copy {
      uint64_t to, from;
      size_t bytes;
    };
    std::vector<Copy> begun;
  };
  // Where the bytes of either kind of memory are.
  std::byte* anywhere(uint64_t address, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto it = find(address);
    if (it == allocations_.end()) return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
    if (address + bytes > it->first + it->second.bytes) std::abort();
    return it->second.bar + (address - it->first);
  }
  int copy_async(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    if (contexts_current != 1) return 1;
    ++copies;
    stream->begun.push_back({to, from, bytes});
    return 0;
  }
  int synchronize(Stream* stream) {
    if (contexts_current != 1) return 1;
    ++waits;
    const bool fails = copy_error != 0 && copies_good == 0;
    if (copy_error != 0 && copies_good > 0) --copies_good;
    for (const auto& [to, from, bytes] : std::exchange(stream->begun, {})) {
      if (!fails) std::memcpy(anywhere(to, bytes), anywhere(from, bytes), bytes);
    }
    return fails ? copy_error.load() : 0;
  }
  int pin(uint64_t base, bool on) {
    const std::lock_guard lock(mutex_);
    if (contexts_current != 1 || pinned_.contains(base) == on) return 1;
    if (on) {
      pinned_.insert(base);
    } else {
      pinned_.erase(base);
    }
    return 0;
  }
  int pointer_attribute(void* value, int attribute, uint64_t address) {
    const std::lock_guard lock(mutex_);
    const auto it = find(address);
    if (it == allocations_.end()) return 1;
    switch (attribute) {
      case 2:
        *static_cast<unsigned*>(value) = 2;
        return 0;
      case 8:
        *static_cast<int*>(value) = is_managed;
        return 0;
      case 9:
        *static_cast<int*>(value) = it->second.ordinal;
        return 0;
      default:
        return 1;
    }
  }
  int device_attribute(int* value, int attribute) const {
    *value = attribute == 124   ? exports_dma_buf
             : attribute == 118 ? writes_ordering
             : attribute == 117 ? flush_options
                                : 0;
    return 0;
  }
  int export_range(int* fd, uint64_t address, size_t bytes) {
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::lock_guard lock(mutex_);
    const auto it = find(address);
    if (address % page != 0 || bytes % page != 0 || contexts_current != 1) return 1;
    if (it == allocations_.end() || address + bytes > it->first + it->second.bytes) return 1;
    if (export_error != 0) return export_error;
    *fd = ::dup(it->second.file);
    shared_[*fd] = it->second.bar + (address - it->first);
    ++exports;
    return 0;
  }

  std::mutex mutex_;
  Allocations allocations_;
  std::set<uint64_t> pinned_;
  std::atomic<int> streams_{0};
  std::map<int, std::byte*> shared_;  // by descriptor, also of those closed since: whoever registered it goes on
};

inline FakeCuda::FakeCuda() {
  g_cuda = this;
  static const device::Driver table = [] {
    device::Driver t{};
    t.init = [](unsigned) { return 0; };
    t.error_string = [](int, const char** text) {
      *text = "a fake error";
      return 0;
    };
    t.device_count = [](int* count) {
      *count = 2;
      return 0;
    };
    t.device_name = [](char* name, int, int ordinal) {
      const char text[] = {'f', 'a', 'k', 'e', static_cast<char>('0' + ordinal), '\0'};
      std::copy(std::begin(text), std::end(text), name);
      return 0;
    };
    t.device_attribute = [](int* value, int attribute, int) { return g_cuda->device_attribute(value, attribute); };
    t.retain_context = [](void** context, int) {
      *context = g_cuda;
      return 0;
    };
    t.push_context = [](void*) {
      ++contexts_current;
      return 0;
    };
    t.pop_context = [](void**) {
      --contexts_current;
      return 0;
    };
    t.pointer_attribute = [](void* value, int attribute, uint64_t address) {
      return g_cuda->pointer_attribute(value, attribute, address);
    };
    t.set_pointer_attribute = [](const void*, int, uint64_t) { return 0; };
    t.create_stream = [](void** stream, unsigned flags) {
      if (contexts_current != 1 || flags != 1) return 1;
      *stream = new Stream;
      ++g_cuda->streams_;
      return 0;
    };
    t.destroy_stream = [](void* stream) {
      delete static_cast<Stream*>(stream);
      --g_cuda->streams_;
      return 0;
    };
    t.synchronize_stream = [](void* stream) { return g_cuda->synchronize(static_cast<Stream*>(stream)); };
    t.copy_async = [](uint64_t to, uint64_t from, size_t bytes, void* stream) {
      return g_cuda->copy_async(to, from, bytes, static_cast<Stream*>(stream));
    };
    t.pin_host = [](void* base, size_t, unsigned) { return g_cuda->pin(reinterpret_cast<uint64_t>(base), true); };
    t.unpin_host = [](void* base) { return g_cuda->pin(reinterpret_cast<uint64_t>(base), false); };
    t.export_range = [](void* handle, uint64_t address, size_t bytes, int, unsigned long long) {
      return g_cuda->export_range(static_cast<int*>(handle), address, bytes);
    };
    t.flush_writes = [](int, int) {
      if (contexts_current != 1) return 1;
      ++g_cuda->flushes;
      return g_cuda->flush_error;
    };
    return t;
  }();
  device::replace_driver(&table);
}

}  // namespace crossrail::test
