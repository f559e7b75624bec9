#include "util/errors.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace crossrail {

namespace {
std::string compose(const std::string& call, int code, const std::string& text, const std::string& remedy) {
  std::string message = call + ": " + text;
  if (code != 0) message += " (errno " + std::to_string(code) + ")";
  if (!remedy.empty()) message += ". Next: " + remedy;
  return message;
}
}  // namespace

TransportError::TransportError(std::string call, int code, std::string text, std::string remedy)
    : std::runtime_error(compose(call, code, text, remedy)),
      call_(std::move(call)),
      code_(code),
      text_(std::move(text)),
      remedy_(std::move(remedy)) {}

namespace {

const char* usual_remedy(int code) {
  switch (code) {
    case EMFILE:
      return "raise the limit on open files (ulimit -n)";
    case ENFILE:
      return "raise the host's limit on open files (sysctl fs.file-max)";
    case EPERM:
      return "see what forbids it to this process: the seccomp profile of its container, or a capability that it lacks";
    case ENOSYS:
      return "allow it in the seccomp profile of this container, or use a newer kernel";
    case ENOMEM:
      return "free memory, or raise the limit on address space (ulimit -v)";
    default:
      return "";
  }
}

}  // namespace

void throw_errno(const char* call, const std::string& what, const std::string& remedy) {
  const int code = errno;
  throw TransportError(call, code, what + ": " + std::strerror(code), remedy.empty() ? usual_remedy(code) : remedy);
}

namespace {
constinit std::atomic<AssertHook> assert_hook{nullptr};
}  // namespace

void set_assert_hook(AssertHook hook) { assert_hook.store(hook, std::memory_order_release); }

namespace {
[[noreturn]] void abort_with_hook(const char* reason) {
  // Cleared first: a bug in the hook itself must not call it again.
  if (const AssertHook hook = assert_hook.exchange(nullptr, std::memory_order_acq_rel)) hook(reason);
  std::abort();
}
}  // namespace

void fail_out_of_memory(const char* whose) {
  std::fprintf(stderr,
               "crossrail: out of memory while engine '%s' was moving data, which can be neither finished nor taken "
               "back: the process ends. Next: %s\n",
               whose, usual_remedy(ENOMEM));
  abort_with_hook("out of memory");
}

void fail_assert(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "crossrail: internal error: %s is false at %s:%d. Please report it.\n", expression, file, line);
  abort_with_hook("failed assertion");
}

}  // namespace crossrail
