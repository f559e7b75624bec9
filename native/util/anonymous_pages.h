// Private memory of this process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail {

// Zeroed pages, released together with their owner.
class AnonymousPages {
 public:
  AnonymousPages() = default;  // empty
  // populate: fault the pages in now. Throws TransportError.
  AnonymousPages(uint64_t length_bytes, bool populate);
  // For memory that may be mostly unused: none is reserved for the unused part. dense: the used part is contiguous, so
  // that huge pages do not make it larger. Throws TransportError.
  static AnonymousPages sparse(uint64_t length_bytes, bool dense);
  AnonymousPages(AnonymousPages&& other) noexcept;
  AnonymousPages& operator=(AnonymousPages&& other) noexcept;
  ~AnonymousPages();

  std::byte* base() const { return base_; }

 private:
  void map(uint64_t length_bytes, int flags, bool huge);

  std::byte* base_ = nullptr;
  uint64_t length_bytes_ = 0;
};

}  // namespace crossrail
