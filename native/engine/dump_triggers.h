// What makes the flight recorder be written to a file without a call: a signal, a failed assertion, or the watchdog
// (engine/watchdog.h).
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <string_view>
#include <thread>

namespace crossrail {

class EngineCore;

// The name of the file written, or why there is none.
struct DumpOutcome {
  std::array<char, 1024> path{};  // NUL-terminated
  int error = 0;                  // errno
  bool written() const { return error == 0; }
};

// Writes "<directory>/crossrail-<engine>-<pid>-<number>.flight", a new file that is removed again if it cannot be
// written completely. Any thread; allocates nothing.
DumpOutcome dump_to_directory(EngineCore& core, std::string_view directory, std::string_view reason);

// From now on, a failed assertion of ours dumps every engine of the process, each to its own directory, before it
// aborts. Idempotent.
void dump_on_failed_assert();

// While it exists, a signal dumps every engine of the process. One at a time.
//
// The signal handler only posts a semaphore; a thread of ours waits for that and writes. So the signal may interrupt
// anything, and it works while every other thread hangs - in a wait of ours, with the GIL, or with a lock of the engine
// - except while opening, closing or forking an engine, which hold the list of engines.
// Threads: constructed and closed by one thread at a time. In a forked child the signal does nothing until close()
// there, or until the child constructs its own.
class SignalDump {
 public:
  // directory: empty: each engine's own. Throws UsageError if there is one already, if the signal has a handler, or if
  // it is a crash signal (SIGSEGV, SIGBUS, SIGFPE, SIGILL).
  SignalDump(int signal_number, std::string directory);
  ~SignalDump() { close(); }
  SignalDump(const SignalDump&) = delete;
  SignalDump& operator=(const SignalDump&) = delete;

  // Restores the signal's default action. Idempotent.
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
