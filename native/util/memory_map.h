// Shared memory by memfd: no names, so nothing leaks when a process is killed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace crossrail {

// An owned file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept;
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int leak();
  void reset();

 private:
  int fd_ = -1;
};

// A mapping of a whole memfd, shared; unmapped with the last reference. Writable, except what a peer lets others only
// read. Within a process the same memfd is mapped once: a second map() returns the same object. So two engines in one
// process see each other's memory at one address, which also lets ThreadSanitizer follow the protocol.
class MemoryMap {
 public:
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;
  ~MemoryMap();

  // Who writes. kOwner: who is passed the file cannot map it to write, from Linux 5.1 on; on older kernels it could,
  // and does not.
  enum class Writers : uint8_t { kAll, kOwner };

  // A new zeroed memfd of `bytes` (rounded up to pages), sealed against shrinking so that no peer can make us fault.
  static std::shared_ptr<MemoryMap> create(const char* name, size_t bytes, Writers writers = Writers::kAll);
  // Maps what a peer sent; refuses anything smaller than `bytes_min`, or not sealed. Keeps no descriptor of another
  // process's file: peers and their regions are many. Throws TransportError.
  static std::shared_ptr<MemoryMap> map(Fd fd, size_t bytes_min, Writers writers = Writers::kAll);

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  // To be passed on; -1 for a peer's file, and after release_fd(), after which nobody new can map it.
  int fd() const { return fd_.get(); }
  void release_fd() { fd_.reset(); }

 private:
  MemoryMap(Fd fd, size_t bytes, bool is_writable, uint64_t device, uint64_t inode);
  static std::shared_ptr<MemoryMap> find_or_map(Fd fd, size_t bytes_min, bool is_writable, bool keeps_fd);
  Fd fd_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t device_;
  uint64_t inode_;
  bool is_writable_;
};

}  // namespace crossrail
