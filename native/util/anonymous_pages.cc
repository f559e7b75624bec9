#include "util/anonymous_pages.h"

#include <sys/mman.h>

#include <string>
#include <utility>

#include "util/errors.h"

namespace crossrail {

AnonymousPages::AnonymousPages(uint64_t length_bytes, bool populate) : length_bytes_(length_bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (populate ? MAP_POPULATE : 0);
  void* memory = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap", "cannot allocate " + std::to_string(length_bytes) + " bytes");
  base_ = static_cast<std::byte*>(memory);
  madvise(memory, length_bytes, MADV_HUGEPAGE);  // fewer faults and TLB misses; a kernel without them says no
}

AnonymousPages::AnonymousPages(AnonymousPages&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), length_bytes_(other.length_bytes_) {}

AnonymousPages& AnonymousPages::operator=(AnonymousPages&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(length_bytes_, other.length_bytes_);
  return *this;
}

AnonymousPages::~AnonymousPages() {
  if (base_ != nullptr) munmap(base_, length_bytes_);
}

}  // namespace crossrail
