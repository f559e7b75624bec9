// Our own threads: if the system refuses one, that is an error with its reason, like any set-up failure.
#pragma once

#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

#include "util/errors.h"

namespace crossrail {

// While it exists, this thread, and any thread that it starts, does not receive signals meant for the process: those
// are for threads that somebody waits on, and for whoever keeps them blocked there. Signals that a thread's own
// instructions cause are not blocked, nor are those of profilers, which are sent to where time is spent.
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

// A thread that runs `body`, or TransportError: std::thread alone only says "Resource temporarily unavailable".
template <typename Body>
std::thread start_thread(Body&& body) {
  const SignalsBlocked blocked;
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    const char* const limits =
        "raise the limit on processes (ulimit -u, the container's pids limit) or on address space "
        "(ulimit -v), or open fewer engines: each has two threads and their stacks";
    const char* const profile =
        "the seccomp profile of this container forbids clone3, for which it has to answer ENOSYS (that of Docker "
        "before 20.10.10 does not): update what runs the container, or its profile";
    throw TransportError("pthread_create", error.code().value(),
                         "cannot start a thread of the engine: " + error.code().message(),
                         error.code() == std::errc::operation_not_permitted ? profile : limits);
  }
}

// In a forked child, for a thread of its parent: leaked, since it can be neither joined nor detached here.
inline void leak_thread(std::thread& thread) { new std::thread(std::move(thread)); }

}  // namespace crossrail
