#include "bindings/gil.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "util/clock.h"

namespace crossrail::bindings {

namespace {
std::atomic<bool> exiting{false};  // written by a holder of the GIL
std::atomic<int> threads_out{0};
}  // namespace

WithoutGil::WithoutGil() {
  if (exiting.load(std::memory_order_relaxed)) return;
  threads_out.fetch_add(1, std::memory_order_relaxed);
  state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ == nullptr) return;
  while (exiting.load(std::memory_order_relaxed)) pause();
  PyEval_RestoreThread(state_);
  threads_out.fetch_sub(1, std::memory_order_relaxed);
}

void begin_exit(double timeout_s) {
  PyThreadState* state = PyEval_SaveThread();
  const Deadline deadline = deadline_in(timeout_s);
  while (threads_out.load(std::memory_order_relaxed) > 0 && now_ns() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  PyEval_RestoreThread(state);
  exiting.store(true, std::memory_order_relaxed);
}

void forget_other_threads() { threads_out.store(0, std::memory_order_relaxed); }

}  // namespace crossrail::bindings
