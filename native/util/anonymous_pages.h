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
  AnonymousPages(AnonymousPages&& other) noexcept;
  AnonymousPages& operator=(AnonymousPages&& other) noexcept;
  ~AnonymousPages();

  std::byte* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  uint64_t length_bytes_ = 0;
};

}  // namespace crossrail
