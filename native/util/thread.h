// Threads of ours: one that the system does not give is an error with its reason, as everything else of set-up.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "util/errors.h"

namespace crossrail {

// A thread that runs `body`, or TransportError: std::thread alone says "Resource temporarily unavailable", of what not.
template <typename Body>
std::thread start_thread(Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw TransportError("pthread_create", error.code().value(),
                         "cannot start a thread of the engine: " + error.code().message(),
                         "raise the limit on processes (ulimit -u, the container's pids limit) or on address space "
                         "(ulimit -v), or open fewer engines: each has two threads and their stacks");
  }
}

}  // namespace crossrail
