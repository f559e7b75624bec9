// Memory for NICs, in pages of its own.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "util/errors.h"

namespace crossrail {

struct FreePages {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Pages = std::unique_ptr<std::byte[], FreePages>;

// [any] Zeroed. Whole pages that contain nothing else: with RDMAV_FORK_SAFE, libibverbs removes the pages of registered
// memory from forked children (ibv_fork_init(3), MADV_DONTFORK), and a child whose heap is in such a page is killed
// when it touches it.
inline Pages make_pages(size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t whole = (bytes + page - 1) / page * page;
  Pages pages(static_cast<std::byte*>(std::aligned_alloc(page, whole)));
  if (pages == nullptr) throw TransportError("aligned_alloc", ENOMEM, "out of memory");
  std::memset(pages.get(), 0, whole);
  return pages;
}

}  // namespace crossrail
