// Threads of ours: one that the system does not give is an error with its reason, as everything else of set-up.
#pragma once

#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

#include "util/errors.h"

namespace crossrail {

// While it lives this thread lets no signal in that is meant for the process, and threads that it starts never will:
// those are for threads that somebody waits on, and for whoever keeps them back there. What a thread's own instructions
// cause is its own, and profilers' signals come to where time is spent.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t signals;
    sigfillset(&signals);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF}) sigdelset(&signals, own);
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A thread that runs `body`, or TransportError: std::thread alone says "Resource temporarily unavailable", of what not.
template <typename Body>
std::thread start_thread(Body&& body) {
  const SignalsBlocked blocked;
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
