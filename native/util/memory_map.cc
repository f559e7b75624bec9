#include "util/memory_map.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

#include "util/errors.h"

namespace crossrail {

Fd::Fd(Fd&& other) noexcept : fd_(other.leak()) {}
Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.leak();
  }
  return *this;
}
Fd::~Fd() { reset(); }
int Fd::leak() { return std::exchange(fd_, -1); }
void Fd::reset() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kSealFutureWrite = 0x10;  // F_SEAL_FUTURE_WRITE, which older headers lack

// Mappings of this process by the file's identity. Never destroyed: engines may outlive static destructors.
// The mutex is held across fork: a child that opens its own engine finds it free, and the map consistent.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<MemoryMap>> maps;

  Registry();
};
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}
Registry::Registry() {
  const auto release = [] { registry().mutex.unlock(); };
  pthread_atfork([] { registry().mutex.lock(); }, release, release);
}

}  // namespace

MemoryMap::MemoryMap(Fd fd, size_t bytes, bool is_writable, uint64_t device, uint64_t inode)
    : fd_(std::move(fd)), bytes_(bytes), device_(device), inode_(inode), is_writable_(is_writable) {
  void* hint = nullptr;
  if (bytes >= kHugePage) {
    // An address that is a multiple of the huge page size lets the kernel use huge pages. The address range is only
    // looked up, not kept: if a mapping into a range of ours failed, it would be unclear how much of the range is left.
    // If somebody takes the range from under us we only lose the alignment.
    void* room = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
      throw_errno("mmap", "no address space for " + std::to_string(bytes) + " bytes",
                  "ask for less, or raise the limit on address space (ulimit -v)");
    hint = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room) + kHugePage - 1) / kHugePage * kHugePage);
    munmap(room, bytes + kHugePage);
  }
  void* data = mmap(hint, bytes, is_writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd_.get(), 0);
  if (data == MAP_FAILED) throw_errno("mmap", "cannot map " + std::to_string(bytes) + " bytes of shared memory");
  data_ = static_cast<std::byte*>(data);
  // Advice only: where huge pages for shared memory are disabled, this fails and 4 KiB pages are used.
  if (bytes >= kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
}

MemoryMap::~MemoryMap() {
  {
    std::lock_guard lock(registry().mutex);
    auto found = registry().maps.find({device_, inode_});
    // A concurrent map() may already have put a fresh mapping here.
    if (found != registry().maps.end() && found->second.expired()) registry().maps.erase(found);
  }
  if (data_ != nullptr) munmap(data_, bytes_);
}

std::shared_ptr<MemoryMap> MemoryMap::create(const char* name, size_t bytes, Writers writers) {
  Fd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) {
    throw_errno("memfd_create", "cannot make shared memory",
                errno == EMFILE
                    ? "raise the limit on open files (ulimit -n), or allocate fewer, longer regions: each has one"
                    : "");
  }
  const size_t rounded = (bytes + 4095) / 4096 * 4096;
  if (ftruncate(fd.get(), static_cast<off_t>(rounded)) != 0) {
    throw_errno("ftruncate", "cannot size shared memory to " + std::to_string(rounded) + " bytes",
                errno == EFBIG
                    ? "raise the limit on the size of files (ulimit -f), which holds for memory that is shared"
                    : "free memory, or raise the container's memory limit");
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) throw_errno("fcntl", "cannot seal shared memory");
  auto map = find_or_map(std::move(fd), rounded, true, true);
  // Our own mapping stays writable. Kernels and sandboxes that do not know this seal refuse it.
  if (writers == Writers::kOwner) (void)fcntl(map->fd(), F_ADD_SEALS, kSealFutureWrite);
  return map;
}

std::shared_ptr<MemoryMap> MemoryMap::map(Fd fd, size_t bytes_min, Writers writers) {
  return find_or_map(std::move(fd), bytes_min, writers == Writers::kAll, false);
}

std::shared_ptr<MemoryMap> MemoryMap::find_or_map(Fd fd, size_t bytes_min, bool is_writable, bool keeps_fd) {
  struct stat info;
  if (fstat(fd.get(), &info) != 0) throw_errno("fstat", "cannot look at shared memory");
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW;  // one mapping serves everybody, now and later
  if (seals < 0 || (seals & kSize) != kSize) {
    throw TransportError("fcntl", 0, "shared memory from a peer is not sealed against shrinking and growing");
  }
  const auto bytes = static_cast<size_t>(info.st_size);
  if (bytes < bytes_min || bytes == 0) {
    throw TransportError(
        "fstat", 0,
        "shared memory from a peer has " + std::to_string(bytes) + " bytes, expected " + std::to_string(bytes_min));
  }
  // Before the lock: if memory runs out below, they are destroyed without it, since ~MemoryMap takes it.
  std::unique_ptr<MemoryMap> made;
  std::shared_ptr<MemoryMap> fresh;
  std::lock_guard lock(registry().mutex);
  auto& maps = registry().maps;
  const std::pair<uint64_t, uint64_t> identity{info.st_dev, info.st_ino};
  if (const auto known = maps.find(identity); known != maps.end()) {
    if (auto existing = known->second.lock()) {
      if (is_writable && !existing->is_writable_)
        throw TransportError("mmap", EACCES, "shared memory from a peer is also its memory that others only read");
      return existing;
    }
  }
  made.reset(new MemoryMap(std::move(fd), bytes, is_writable, info.st_dev, info.st_ino));
  fresh = std::move(made);
  if (!keeps_fd) fresh->release_fd();
  maps[identity] = fresh;
  return fresh;
}

}  // namespace crossrail
