// What causes the flight recorder to be written to a file without a call: a signal, a failed assertion, and the
// watchdog (engine/watchdog.h).
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <string_view>
#include <thread>

namespace crossrail {

class EngineCore;

// The name of the file that was written, or why none was.
struct DumpOutcome {
  std::array<char, 1024> path{};  // ends with 0
  int error = 0;                  // errno
  bool written() const { return error == 0; }
};

// Writes "<directory>/crossrail-<engine>-<pid>-<number>.flight", a new file, of which nothing is left if it cannot be
// written to its end. Any thread; allocates nothing.
DumpOutcome dump_to_directory(EngineCore& core, std::string_view directory, std::string_view reason);

// From now on a failed assertion of ours dumps every engine of the process, each to its own directory, before it
// aborts. Idempotent.
void dump_on_failed_assert();

// While it lives, a signal dumps every engine of the process. One at a time.
//
// The signal handler does nothing but post a semaphore; a thread of ours, which waits for that, writes. So the signal
// may interrupt anything, and works while every other thread hangs - in a wait of ours, with the GIL, or with a lock of
// the engine's - except in opening, closing or forking an engine: these hold the list of engines.
// Threads: made and closed by one thread at a time. In a forked child the signal does nothing until close() there, or
// until the child makes one of its own.
class SignalDump {
 public:
  // directory: empty: each engine's own. Throws UsageError when there is one already, the signal has a handler, or it
  // is one of a crash (SIGSEGV, SIGBUS, SIGFPE, SIGILL).
  SignalDump(int signal_number, std::string directory);
  ~SignalDump() { close(); }
  SignalDump(const SignalDump&) = delete;
  SignalDump& operator=(const SignalDump&) = delete;

  // Gives the signal its default action back. Idempotent.
  void close();

 private:
  void run();

  const int signal_number_;
  const std::string directory_;
  const int owner_pid_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace crossrail
