// Releases the GIL in a way that is safe if the interpreter ends while threads are out (without the GIL).
//
// Up to Python 3.13 a thread that asks an ending interpreter for the GIL is ended by pthread_exit, whose unwinding
// through C++ ends the whole process. So our exit handler closes all engines, which wakes everybody, and waits until
// the threads that are out have come back. From then on the thread that ends the interpreter keeps the GIL, whatever
// other exit handlers do with us. Other threads stay parked where they would come back or go out again, as in Python
// 3.14. This concerns only daemon threads, since Python has joined the others by then, and threads started even later:
// an engine that a later exit handler opens has no callbacks.
//
// A thread that calls Python code from here counts as out, too: it may lose the GIL there, and the unwinding would pass
// through the calling frames.
#pragma once

#include <Python.h>

#include <utility>

namespace crossrail::bindings {

// Scope without the GIL.
// Thread: a holder of the GIL.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;  // null: we kept the GIL
};

// Scope in which Python code is called: the package's, or the user's. See in_python().
// Thread: a holder of the GIL.
class IntoPython {
 public:
  IntoPython();
  ~IntoPython();
  IntoPython(const IntoPython&) = delete;
  IntoPython& operator=(const IntoPython&) = delete;

 private:
  bool counted_ = false;
};

// Returns what `call` returns. `call` runs Python code.
template <typename Call>
auto in_python(Call&& call) {
  const IntoPython scope;
  return std::forward<Call>(call)();
}

// Nobody may ask for the GIL any more: every thread that would is parked here, except the one that has it. Called in a
// scope without it.
void park_if_exiting();

// The interpreter is about to end and all engines are closed. Waits up to timeout_s for the threads that are out.
void begin_exit(double timeout_s);

// In a new forked child: no other thread is out.
void forget_other_threads();

}  // namespace crossrail::bindings
