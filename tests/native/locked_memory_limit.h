// The limit on locked memory, lower while this exists.
#pragma once

#include <doctest/doctest.h>
#include <sys/resource.h>

namespace crossrail::test {

class LockedMemoryLimit {
 public:
  // bytes: of no more than the hard limit that kernels have had by default for longest, 64 KiB.
  explicit LockedMemoryLimit(rlim_t bytes) {
    REQUIRE(bytes <= 65536);
    REQUIRE(::getrlimit(RLIMIT_MEMLOCK, &before_) == 0);
    const rlimit lower{bytes, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_MEMLOCK, &lower) == 0);
  }
  ~LockedMemoryLimit() { ::setrlimit(RLIMIT_MEMLOCK, &before_); }
  LockedMemoryLimit(const LockedMemoryLimit&) = delete;
  LockedMemoryLimit& operator=(const LockedMemoryLimit&) = delete;

 private:
  rlimit before_{};
};

}  // namespace crossrail::test
