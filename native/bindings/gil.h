// Letting the GIL go, such that threads which are still out when the interpreter ends do no harm.
//
// Up to Python 3.13 a thread that asks for the GIL of an ending interpreter is ended by pthread_exit, whose unwinding
// through C++ ends the process instead. So our exit handler closes all engines, which wakes everybody, and waits for
// those who are out to come back in. From then on the thread that ends the interpreter keeps the GIL, whatever else its
// exit handlers do with us, and others stay parked, as Python 3.14 does it, where they would come back, or go out anew.
// Only daemon threads can be concerned, since Python has joined the others by then; and threads that begin even later:
// an engine that an exit handler behind ours opens has no callbacks.
//
// Who calls Python code from here is out, too: the GIL is lost there now and then, and the unwinding would come through
// the frames that called.
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

// Scope in which Python code is called: that of the package, or of the user. See in_python().
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

// What `call` returns, which calls Python code.
template <typename Call>
auto in_python(Call&& call) {
  const IntoPython scope;
  return std::forward<Call>(call)();
}

// Nobody may ask for the GIL any more: whoever would stays parked here, but for the thread that has it. Called in a
// scope without it.
void park_if_exiting();

// The interpreter is about to end and all engines are closed. Waits up to timeout_s for those who are out.
void begin_exit(double timeout_s);

// In a new forked child: nobody else is out.
void forget_other_threads();

}  // namespace crossrail::bindings
