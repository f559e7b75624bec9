// A double of NVIDIA's driver: "memory of a GPU" is an address that every touch of the CPU's faults at, and the dma-buf
// of it is what a double of a NIC reaches the same bytes by. So who touches such memory by the CPU ends the test.
// Copies happen when their stream is waited for, not before. Calls may come from any thread.
//
// Who uses it: native tests by fake_cuda.h, Python's by libcuda.so.1 of fake_driver.cc.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_kernels.h"
#include "fake_vmm.h"

namespace crossrail::test {

class FakeGpu;
inline FakeGpu* g_gpu = nullptr;  // one at a time: the driver's calls carry no handle

class FakeGpu {
 public:
  // What devices and drivers differ in.
  bool exports_dma_buf = true;
  bool is_managed = false;
  int writes_ordering = 100;  // 0: what NICs write has to be flushed
  int flush_options = 1;      // 0: by nobody but streams
  int export_error = 0;
  int flush_error = 0;
  int allocate_error = 0;
  std::atomic<int> ipc_error{0};           // of both ends
  std::atomic<int> copy_error{0};          // of the wait for a stream
  std::atomic<uint32_t> copies_good{~0u};  // so many go well before copy_error,
  std::atomic<uint32_t> copies_bad{~0u};   // and so many fail; those behind them go well again
  FakeVmm vmm;                             // its switches are for before engines are there
  std::atomic<int> out_of_reach{-1};       // a GPU that reaches no other's memory, nor is reached
  std::atomic<bool> kernels_run{false};    // of the user's: contexts are waited for until they end
  bool knows_mappings = true;              // newer drivers: where they begin, and what has a handle of IPC

  // What was done.
  uint32_t flushes = 0;
  uint32_t exports = 0;
  std::atomic<uint64_t> copies{0};
  std::atomic<uint64_t> waits{0};
  static inline thread_local int contexts_current = 0;
  static inline thread_local void* context_current = nullptr;  // the user's, below those of the core

  FakeKernels kernels;

  FakeGpu() {
    g_gpu = this;
    kernels.gpu_memory = [this](uint64_t address) -> std::byte* {
      const std::lock_guard lock(mutex_);
      const auto it = find(address);
      return it == allocations_.end() ? nullptr : it->second.bar + (address - it->first);
    };
  }
  ~FakeGpu() {
    g_gpu = nullptr;
    for (const auto& [address, allocation] : allocations_) unmap(address, allocation);
  }
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  // Of that GPU. bytes: whole pages.
  std::byte* allocate(uint64_t bytes, int ordinal = 0) {
    const int file = ::memfd_create("gpu", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
    return map(bytes, file, ordinal);
  }
  // That allocation, whole. Who touches it afterwards ends the test.
  void free(const std::byte* address) {
    const std::lock_guard lock(mutex_);
    const auto it = allocations_.find(reinterpret_cast<uint64_t>(address));
    if (it == allocations_.end()) std::abort();
    unmap(it->first, it->second);
    allocations_.erase(it);
  }
  // As torch's expandable segments: so many pieces of physical memory (FakeVmm::kUnit each) one after the other, in a
  // longer range of addresses.
  std::byte* allocate_segments(uint64_t count, bool is_shareable, int ordinal = 0) {
    const std::lock_guard lock(mutex_);
    uint64_t address = 0;
    if (vmm.reserve(&address, (count + 1) * FakeVmm::kUnit) != 0) std::abort();
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t handle = 0;
      if (vmm.create(&handle, FakeVmm::kUnit, ordinal, is_shareable, true) != 0) std::abort();
      if (map_physical(address + i * FakeVmm::kUnit, FakeVmm::kUnit, handle) != 0) std::abort();
      allocations_[address + i * FakeVmm::kUnit].access = ~0u;
      vmm.release(handle);
    }
    return FakeVmm::at(address);
  }
  void free_segments(const std::byte* address) {
    const std::lock_guard lock(mutex_);
    uint64_t bytes = 0;
    const uint64_t base = vmm.reservation_of(reinterpret_cast<uint64_t>(address), 1, &bytes);
    for (auto it = allocations_.lower_bound(base); it != allocations_.end() && it->first < base + bytes;) {
      if (unmap_physical((it++)->first, FakeVmm::kUnit) != 0) std::abort();
    }
    if (vmm.give_back(base, bytes) != 0) std::abort();
  }
  // The bytes at an address of the GPU, as its kernels see them.
  std::byte* bytes_at(const std::byte* address) {
    const std::lock_guard lock(mutex_);
    const auto it = find(reinterpret_cast<uint64_t>(address));
    if (it == allocations_.end()) std::abort();
    return it->second.bar + (reinterpret_cast<uint64_t>(address) - it->first);
  }
  // What a NIC reaches by a dma-buf.
  std::byte* reach(int fd, uint64_t offset, uint64_t) { return shared_.at(fd) + offset; }

  // What it still keeps for who uses it: nothing, once engines are closed.
  uint64_t pinned() {
    const std::lock_guard lock(mutex_);
    return pinned_.size();
  }
  int streams() const { return streams_; }
  int allocated() const { return allocated_; }
  uint64_t imports() {
    const std::lock_guard lock(mutex_);
    return imported_.size();
  }
  // Mappings of physical memory, and handles, without those of a test's own.
  uint64_t mappings() {
    const std::lock_guard lock(mutex_);
    return static_cast<uint64_t>(std::count_if(allocations_.begin(), allocations_.end(), [&](const auto& each) {
      return each.second.handle != 0 && !each.second.is_tests;
    }));
  }
  uint64_t handles() {
    const std::lock_guard lock(mutex_);
    return vmm.handles();
  }

 private:
  friend struct FakeCalls;
  struct Allocation {
    uint64_t bytes;
    std::byte* bar;
    int file;
    int ordinal;
    uint64_t id;
    uint64_t handle = 0;   // of physical memory that is mapped there; else cudaMalloc's
    uint32_t access = ~0;  // which GPUs may, as a mask
    bool is_tests = false;
  };
  // What is in a CUipcMemHandle of ours: where another process finds the allocation's bytes.
  struct Shared {
    int pid;
    int file;
    uint64_t bytes;
  };
  struct Import {
    Shared shared;
    uint32_t opened;
  };
  using Allocations = std::map<uint64_t, Allocation>;

  std::byte* map(uint64_t bytes, int file, int ordinal) {
    void* const address = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* const bar = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (address == MAP_FAILED || bar == MAP_FAILED) std::abort();
    const std::lock_guard lock(mutex_);
    allocations_[reinterpret_cast<uint64_t>(address)] = {
        .bytes = bytes, .bar = static_cast<std::byte*>(bar), .file = file, .ordinal = ordinal, .id = ++last_id_};
    return static_cast<std::byte*>(address);
  }
  static void unmap(uint64_t address, const Allocation& allocation) {
    ::munmap(reinterpret_cast<void*>(address), allocation.bytes);  // NOLINT(performance-no-int-to-ptr)
    ::munmap(allocation.bar, allocation.bytes);
    ::close(allocation.file);
  }

  // --- virtual memory management; the mutex is held

  int map_physical(uint64_t address, uint64_t bytes, uint64_t handle) {
    const FakeVmm::Physical* const physical = vmm.find(handle);
    if (physical == nullptr || bytes % FakeVmm::kUnit != 0 || bytes > physical->bytes) return 1;
    if (vmm.reservation_of(address, bytes) == 0 || find(address) != allocations_.end()) return 1;
    const int file = ::fcntl(physical->file, F_DUPFD_CLOEXEC, 0);
    void* const bar = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || bar == MAP_FAILED) std::abort();
    allocations_[address] = {.bytes = bytes,
                             .bar = static_cast<std::byte*>(bar),
                             .file = file,
                             .ordinal = physical->ordinal,
                             .id = ++last_id_,
                             .handle = handle,
                             .access = 0,
                             .is_tests = physical->is_tests};
    return vmm.retain(handle);
  }
  int unmap_physical(uint64_t address, uint64_t bytes) {
    const auto it = allocations_.find(address);
    if (it == allocations_.end() || it->second.handle == 0 || it->second.bytes != bytes) return 1;
    ::munmap(it->second.bar, bytes);
    ::close(it->second.file);
    vmm.release(it->second.handle);
    allocations_.erase(it);
    return 0;
  }
  int set_access(uint64_t address, uint64_t bytes, int gpu) {
    const auto it = allocations_.find(address);
    if (it == allocations_.end() || it->second.handle == 0 || it->second.bytes != bytes) return 1;
    if (gpu < 0 || gpu >= FakeKernels::kGpus) return 101;
    if (gpu != it->second.ordinal && (gpu == out_of_reach || it->second.ordinal == out_of_reach)) return 217;
    it->second.access |= 1u << gpu;
    return 0;
  }
  // Whether a copy on the GPU whose context is current may touch that; a kernel of its: of what cudaMalloc gave another
  // GPU it may not, which the driver copies.
  bool reaches(uint64_t address, bool by_kernel = false) {
    const std::lock_guard lock(mutex_);
    const auto it = find(address);
    if (it == allocations_.end()) return true;
    const Allocation& found = it->second;
    const int gpu = kernels.gpu_of(context_current);
    const bool is_anothers = found.handle == 0 && !imported_.contains(it->first) && found.ordinal != gpu;
    return (found.access & 1u << gpu) != 0 && !(by_kernel && is_anothers);
  }

  Allocations::iterator find(uint64_t address) {
    auto it = allocations_.upper_bound(address);
    if (it == allocations_.begin()) return allocations_.end();
    --it;
    return address < it->first + it->second.bytes ? it : allocations_.end();
  }
  struct Stream {
    struct Copy {
      uint64_t to, from;  // from nowhere: zeros
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
    if (!reaches(to) || !reaches(from)) return 700;
    ++copies;
    stream->begun.push_back({to, from, bytes});
    return 0;
  }
  // By a kernel: address, address, length of each.
  int copy_pieces(const uint64_t* pieces, size_t count, Stream* stream) {
    if (contexts_current != 1) return 1;
    ++copies;
    for (; count > 0; --count, pieces += 3) {
      if (!reaches(pieces[0], true) || !reaches(pieces[1], true)) return 700;
      stream->begun.push_back({pieces[0], pieces[1], pieces[2]});
    }
    return 0;
  }
  int synchronize(Stream* stream) {
    if (contexts_current != 1) return 1;
    ++waits;
    const bool fails = copy_error != 0 && copies_good == 0 && copies_bad > 0;
    if (fails) --copies_bad;
    if (copy_error != 0 && copies_good > 0) --copies_good;
    for (const auto& [to, from, bytes] : std::exchange(stream->begun, {})) {
      if (fails) continue;
      if (from == 0) {
        std::memset(anywhere(to, bytes), 0, bytes);
      } else {
        std::memcpy(anywhere(to, bytes), anywhere(from, bytes), bytes);
      }
    }
    return fails ? copy_error.load() : 0;
  }
  int get_ipc_handle(void* handle, uint64_t address) {
    const std::lock_guard lock(mutex_);
    const auto it = allocations_.find(address);
    if (contexts_current != 1 || it == allocations_.end()) return 1;
    if (ipc_error != 0) return ipc_error;
    if (it->second.handle != 0) return 1;
    const Shared shared{::getpid(), it->second.file, it->second.bytes};
    std::memcpy(handle, &shared, sizeof shared);
    return 0;
  }
  int open_ipc_handle(uint64_t* address, const void* handle) {
    Shared shared{};
    std::memcpy(&shared, handle, sizeof shared);
    if (contexts_current != 1) return 1;
    if (shared.pid == ::getpid()) return 201;  // the driver maps no process's memory to itself
    if (ipc_error != 0) return ipc_error;
    {
      const std::lock_guard lock(mutex_);
      for (auto& [base, import] : imported_) {
        if (std::memcmp(&import.shared, &shared, sizeof shared) != 0) continue;
        ++import.opened;
        *address = base;
        return 0;
      }
    }
    const std::string path = "/proc/" + std::to_string(shared.pid) + "/fd/" + std::to_string(shared.file);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return 1;
    *address = reinterpret_cast<uint64_t>(map(shared.bytes, file, 0));
    const std::lock_guard lock(mutex_);
    imported_[*address] = {shared, 1};
    return 0;
  }
  int close_ipc_handle(uint64_t address) {
    const std::lock_guard lock(mutex_);
    const auto it = imported_.find(address);
    if (contexts_current != 1 || it == imported_.end()) return 1;
    if (--it->second.opened > 0) return 0;
    const auto allocation = allocations_.find(address);
    unmap(address, allocation->second);
    allocations_.erase(allocation);
    imported_.erase(it);
    return 0;
  }
  int pin(uint64_t base, size_t bytes, unsigned flags) {
    const int error = kernels.pinned(base, bytes, flags);
    return error != 0 ? error : set_pinned(base, true);
  }
  int set_pinned(uint64_t base, bool on) {
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
      case 7:
        *static_cast<uint64_t*>(value) = it->second.id;
        return 0;
      case 8:
        *static_cast<int*>(value) = is_managed;
        return 0;
      case 9:
        *static_cast<int*>(value) = it->second.ordinal;
        return 0;
      case 10:
        *static_cast<int*>(value) = it->second.handle == 0;
        return knows_mappings ? 0 : 1;
      case 11:
        *static_cast<uint64_t*>(value) = it->second.handle == 0 ? it->first : vmm.reservation_of(address, 1);
        return 0;
      case 12: {
        uint64_t bytes = it->second.bytes;
        if (it->second.handle != 0) vmm.reservation_of(address, 1, &bytes);
        *static_cast<uint64_t*>(value) = bytes;
        return 0;
      }
      case 18:
        *static_cast<uint64_t*>(value) = it->second.bytes;
        return knows_mappings ? 0 : 1;
      case 19:
        *static_cast<uint64_t*>(value) = it->first;
        return knows_mappings ? 0 : 1;
      default:
        return 1;
    }
  }
  int device_attribute(int* value, int attribute, int ordinal) const {
    *value = attribute == 124   ? exports_dma_buf
             : attribute == 33  ? 0x53 + 0x11 * ordinal  // at 0000:53:00.0, 0000:64:00.0, as p5's
             : attribute == 102 ? vmm.has_vmm
             : attribute == 103 ? vmm.gives_fds
             : attribute == 110 ? vmm.has_vmm
             : attribute == 75  ? kernels.capability.load()
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
  uint64_t last_id_ = 0;
  std::map<uint64_t, Import> imported_;  // by address
  std::set<uint64_t> pinned_;
  std::atomic<int> streams_{0};
  std::atomic<int> allocated_{0};     // by the driver's call
  std::map<int, std::byte*> shared_;  // by descriptor, also of those closed since: whoever registered it goes on
};

}  // namespace crossrail::test
