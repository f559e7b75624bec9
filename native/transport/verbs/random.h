// Numbers that strangers cannot guess: of first packets and of queue keys.
#pragma once

#include <sys/random.h>

#include <cerrno>
#include <cstdint>

#include "util/errors.h"

namespace crossrail::verbs {

inline uint32_t random_bits() {
  uint32_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits))
    throw_errno("getrandom", "the kernel gives no random bytes");
  return bits;
}

}  // namespace crossrail::verbs
