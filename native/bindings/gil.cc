#include "bindings/gil.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "util/clock.h"

namespace crossrail::bindings {

namespace {
std::atomic<bool> exiting{false};  // written by the thread that ends the interpreter
// Threads without the GIL, or in Python code that we called. Relaxed: begin_exit() reads nothing but the number, and
// what those threads have done is ordered by the GIL, which each of them takes before it is counted out.
std::atomic<int> threads_out{0};
thread_local bool ends_interpreter = false;  // runs the remaining exit handlers, and keeps the GIL for them

[[noreturn]] void park() {
  for (;;) pause();
}
}  // namespace

WithoutGil::WithoutGil() {
  if (ends_interpreter) return;
  if (exiting.load(std::memory_order_relaxed)) {
    PyEval_SaveThread();
    park();
  }
  threads_out.fetch_add(1, std::memory_order_relaxed);
  state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ == nullptr) return;
  park_if_exiting();
  PyEval_RestoreThread(state_);
  threads_out.fetch_sub(1, std::memory_order_relaxed);
}

IntoPython::IntoPython() {
  if (ends_interpreter) return;
  if (exiting.load(std::memory_order_relaxed)) {
    PyEval_SaveThread();
    park();
  }
  threads_out.fetch_add(1, std::memory_order_relaxed);
  counted_ = true;
}

IntoPython::~IntoPython() {
  if (counted_) threads_out.fetch_sub(1, std::memory_order_relaxed);
}

void park_if_exiting() {
  if (exiting.load(std::memory_order_relaxed) && !ends_interpreter) park();
}

void begin_exit(double timeout_s) {
  PyThreadState* state = PyEval_SaveThread();
  const Deadline deadline = deadline_in(timeout_s);
  while (threads_out.load(std::memory_order_relaxed) > 0 && now_ns() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  ends_interpreter = true;
  exiting.store(true, std::memory_order_relaxed);  // before we ask for the GIL, which others may be waiting for by then
  PyEval_RestoreThread(state);
}

void forget_other_threads() {
  threads_out.store(0, std::memory_order_relaxed);
  exiting.store(false, std::memory_order_relaxed);  // only the parent is exiting, which forked in an exit handler
  ends_interpreter = false;
}

}  // namespace crossrail::bindings
