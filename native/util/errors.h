// The two kinds of errors that are thrown. Data-path failures are never thrown: they are statuses of completions.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace crossrail {

// A number as text, for error messages.
inline std::string text(uint64_t value) { return std::to_string(value); }

// The caller's mistake: the text names the argument, its value and the bound.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Set-up or system failure.
class TransportError : public std::runtime_error {
 public:
  // call: what was attempted ("mmap"); code: errno or 0; text: what happened; remedy: what to do next, may be empty.
  TransportError(std::string call, int code, std::string text, std::string remedy = {});

  const std::string& call() const { return call_; }
  int code() const { return code_; }
  const std::string& text() const { return text_; }
  const std::string& remedy() const { return remedy_; }

 private:
  std::string call_;
  int code_;
  std::string text_;
  std::string remedy_;
};

// The engine was closed, or belongs to the parent of this forked process.
class EngineClosedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A wait without deadline in a simulated world where nothing is left to happen.
class SimulationIdleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws TransportError for the errno of a failed system call. remedy: empty: what usually helps against that errno.
[[noreturn]] void throw_errno(const char* call, const std::string& what, const std::string& remedy = {});

// Called once, by the first thread that aborts here, after it has printed the reason; the process aborts when the hook
// returns. reason: two words. Any thread.
using AssertHook = void (*)(const char* reason);
void set_assert_hook(AssertHook hook);

// Out of memory at a point where an operation can be neither finished nor undone. Prints and aborts, like fail_assert.
// whose: the name of the engine.
[[noreturn]] void fail_out_of_memory(const char* whose);

// A bug of ours: prints and aborts. Enabled in release builds, off the hot path.
[[noreturn]] void fail_assert(const char* expression, const char* file, int line);

}  // namespace crossrail

#define CROSSRAIL_ASSERT(expression) \
  ((expression) ? (void)0 : ::crossrail::fail_assert(#expression, __FILE__, __LINE__))
