// Memory that runs out where a test wants it, for LD_PRELOAD: of what crossrail's native module asks for on one thread,
// the n-th piece is refused.
#include <dlfcn.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#define CROSSRAIL_CALL extern "C" __attribute__((visibility("default")))

CROSSRAIL_CALL void* __libc_malloc(size_t bytes) noexcept;
CROSSRAIL_CALL void* __libc_calloc(size_t count, size_t bytes) noexcept;
CROSSRAIL_CALL void* __libc_memalign(size_t alignment, size_t bytes) noexcept;

namespace {

thread_local long pieces_left = 0;  // until the one that is refused; 0: none is
thread_local bool is_looking = false;

bool is_of_the_module(void* caller) {
  Dl_info where;
  is_looking = true;
  const bool is_found = dladdr(caller, &where) != 0 && std::strstr(where.dli_fname, "/_core.") != nullptr;
  is_looking = false;
  return is_found;
}

bool is_refused(void* caller) {
  if (pieces_left == 0 || is_looking || !is_of_the_module(caller) || --pieces_left != 0) return false;
  errno = ENOMEM;
  return true;
}

}  // namespace

// Of this thread: the n-th piece from now on is refused; 0: none. Returns how many were left until it: 0, it was.
CROSSRAIL_CALL long fail_malloc_at(long n) noexcept {
  const long left = pieces_left;
  pieces_left = n;
  return left;
}

CROSSRAIL_CALL void* malloc(size_t bytes) noexcept {
  return is_refused(__builtin_return_address(0)) ? nullptr : __libc_malloc(bytes);
}

CROSSRAIL_CALL void* calloc(size_t count, size_t bytes) noexcept {
  return is_refused(__builtin_return_address(0)) ? nullptr : __libc_calloc(count, bytes);
}

CROSSRAIL_CALL void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  return is_refused(__builtin_return_address(0)) ? nullptr : __libc_memalign(alignment, bytes);
}
