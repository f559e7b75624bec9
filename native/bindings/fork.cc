#include "bindings/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <string>

#include "bindings/gil.h"
#include "util/errors.h"

namespace crossrail::bindings {

uint32_t fork_generation = 0;

namespace {
pid_t parent_pid = 0;
pid_t this_pid = 0;

void count_fork() {
  fork_generation++;
  parent_pid = this_pid;
  this_pid = getpid();
  forget_other_threads();
}
}  // namespace

void watch_forks() {
  this_pid = getpid();
  const int code = pthread_atfork(nullptr, nullptr, count_fork);
  if (code != 0) throw TransportError("pthread_atfork", code, "cannot learn of forks");
}

void throw_forked() {
  throw EngineClosedError("this engine belongs to process " + std::to_string(parent_pid) + ", and process " +
                          std::to_string(this_pid) +
                          " is a forked child of it: an engine does not survive a fork. Next: open an engine in the "
                          "child, or start the child with the 'spawn' method");
}

}  // namespace crossrail::bindings
