#include "util/anonymous_pages.h"

#include <sys/mman.h>

#include <string>
#include <utility>

#include "util/errors.h"

namespace crossrail {

AnonymousPages::AnonymousPages(uint64_t length_bytes, bool populate) {
  map(length_bytes, populate ? MAP_POPULATE : 0, true);
}

AnonymousPages AnonymousPages::sparse(uint64_t length_bytes, bool dense) {
  AnonymousPages pages;
  pages.map(length_bytes, MAP_NORESERVE, dense);
  return pages;
}

void AnonymousPages::map(uint64_t length_bytes, int flags, bool huge) {
  void* memory = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap", "cannot allocate " + std::to_string(length_bytes) + " bytes");
  base_ = static_cast<std::byte*>(memory);
  length_bytes_ = length_bytes;
  if (huge) madvise(memory, length_bytes, MADV_HUGEPAGE);  // fewer faults and TLB misses; a kernel without them says no
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
