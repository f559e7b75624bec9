// Memory of this process alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail {

// Zeroed pages, given back with their owner.
class AnonymousPages {
 public:
  AnonymousPages() = default;  // none
  // populate: faulted in now. Throws TransportError.
  AnonymousPages(uint64_t length_bytes, bool populate);
  // Of which perhaps little is ever used: no memory is set aside for the rest. dense: what is used is in one piece, so
  // that huge pages do not make it more. Throws TransportError.
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
