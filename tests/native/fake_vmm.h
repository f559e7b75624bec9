// Of the double of NVIDIA's driver: virtual memory management. Physical memory is a file without a name, a handle is a
// descriptor of it, and so is what other processes get. Reserved addresses fault, and so do mapped ones: their bytes
// are reached as those of any memory of the double's GPU.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace crossrail::test {

// What is behind handles and addresses. Its user guards it.
class FakeVmm {
 public:
  static constexpr uint64_t kUnit = 2 << 20;
  struct Physical {
    int file;
    uint64_t bytes;
    int ordinal;
    bool is_shareable;
    uint32_t uses;
    bool is_tests;  // a test's own, not the core's
  };

  bool has_vmm = true;
  bool gives_fds = true;
  int create_error = 0;
  int export_error = 0;
  int import_error = 0;

  int create(uint64_t* handle, size_t bytes, int ordinal, bool is_shareable, bool is_tests = false) {
    if (create_error != 0) return create_error;
    if (bytes == 0 || bytes % kUnit != 0 || bytes >> 40 != 0) return bytes >> 40 != 0 ? 2 : 1;
    const int file = ::memfd_create((kName + std::to_string(ordinal)).c_str(), MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) std::abort();
    // What was there before: nobody clears it.
    if (!is_tests && ::pwrite(file, "dirt", 4, static_cast<off_t>(bytes / 2)) != 4) std::abort();
    *handle = add({file, bytes, ordinal, is_shareable, 1, is_tests});
    return 0;
  }
  int retain(uint64_t handle) {
    const auto it = physical_.find(handle);
    if (it == physical_.end()) return 1;
    ++it->second.uses;
    return 0;
  }
  int release(uint64_t handle) {
    const auto it = physical_.find(handle);
    if (it == physical_.end()) return 1;
    if (--it->second.uses > 0) return 0;
    ::close(it->second.file);
    physical_.erase(it);
    return 0;
  }
  int share(int* fd, uint64_t handle) {
    const auto it = physical_.find(handle);
    if (it == physical_.end() || !it->second.is_shareable) return 1;
    if (export_error != 0) return export_error;
    *fd = ::fcntl(it->second.file, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? 304 : 0;
  }
  // Of a descriptor that is none of such memory: refused.
  int import(uint64_t* handle, int fd) {
    if (import_error != 0) return import_error;
    char name[64] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    if (::readlink(link.c_str(), name, sizeof name - 1) < 0) return 1;
    const std::string prefix = std::string("/memfd:") + kName;
    struct stat info{};
    if (std::string(name).rfind(prefix, 0) != 0 || ::fstat(fd, &info) != 0) return 1;
    const int file = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return 304;
    *handle = add({file, static_cast<uint64_t>(info.st_size), std::atoi(name + prefix.size()), true, 1, false});
    return 0;
  }
  const Physical* find(uint64_t handle) const {
    const auto it = physical_.find(handle);
    return it == physical_.end() ? nullptr : &it->second;
  }

  int reserve(uint64_t* address, size_t bytes) {
    if (bytes == 0 || bytes % kUnit != 0) return 1;
    void* const room = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return 2;
    *address = reinterpret_cast<uint64_t>(room);
    reserved_[*address] = bytes;
    return 0;
  }
  int give_back(uint64_t address, size_t bytes) {
    const auto it = reserved_.find(address);
    if (it == reserved_.end() || it->second != bytes) return 1;
    reserved_.erase(it);
    ::munmap(at(address), bytes);
    return 0;
  }
  // Where the reservation begins that such addresses are in, and its bytes; 0: in none.
  uint64_t reservation_of(uint64_t address, uint64_t bytes, uint64_t* reserved_bytes = nullptr) const {
    auto it = reserved_.upper_bound(address);
    if (it == reserved_.begin()) return 0;
    --it;
    if (address + bytes > it->first + it->second) return 0;
    if (reserved_bytes != nullptr) *reserved_bytes = it->second;
    return it->first;
  }
  static std::byte* at(uint64_t address) {
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  // Of the core's.
  uint64_t handles() const {
    uint64_t count = 0;
    for (const auto& [handle, physical] : physical_) count += physical.is_tests ? 0 : 1;
    return count;
  }

 private:
  static constexpr const char* kName = "gpu-vmm-";
  uint64_t add(const Physical& physical) {
    physical_[++last_] = physical;
    return last_;
  }
  std::map<uint64_t, Physical> physical_;  // by handle
  std::map<uint64_t, uint64_t> reserved_;  // bytes by address
  uint64_t last_ = 1000;
};

}  // namespace crossrail::test
