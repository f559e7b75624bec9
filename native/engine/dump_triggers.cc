#include "engine/dump_triggers.h"

#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "engine/core.h"
#include "engine/flight_dump.h"
#include "util/clock.h"
#include "util/errors.h"
#include "util/thread.h"

namespace crossrail {

namespace {

constexpr int kNamesTried = 1000;

// Number of the last file that this process wrote, so that two dumps of one engine get different names.
constinit std::atomic<int> last_number{0};

// Appends an engine's name to a file name: unsafe characters become '_'.
void put_name(std::string_view name, std::array<char, 80>* text) {
  const size_t length = std::min(name.size(), text->size() - 1);
  for (size_t i = 0; i < length; ++i) {
    const auto letter = static_cast<unsigned char>(name[i]);
    const bool is_plain = letter < 0x80 && (std::isalnum(letter) != 0 || letter == '-' || letter == '.');
    (*text)[i] = is_plain ? name[i] : '_';
  }
  (*text)[length] = 0;
}

// To standard error, which may be a pipe that nobody reads: whatever it does not accept soon is lost.
void say(std::string_view text) {
  constexpr int64_t kPatienceNs = 500'000'000;
  const Deadline until = now_ns() + kPatienceNs;
  while (!text.empty()) {
    const int64_t left_ns = until - now_ns();
    pollfd out{STDERR_FILENO, POLLOUT, 0};
    if (left_ns <= 0 || poll(&out, 1, static_cast<int>(left_ns / 1'000'000) + 1) == 0) return;
    if ((out.revents & ~POLLOUT) != 0) return;   // nobody is there to read it
    if ((out.revents & POLLOUT) == 0) continue;  // interrupted
    // A pipe that polls as writable accepts this much without blocking.
    const ssize_t written = write(STDERR_FILENO, text.data(), std::min<size_t>(text.size(), PIPE_BUF));
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
    if (written < 0 && errno != EINTR && errno != EAGAIN) return;
  }
}

// Messages about several engines, one line each. Allocates nothing.
class Lines {
 public:
  void add(const EngineCore& core, const DumpOutcome& outcome, const char* reason) {
    char* const line = text_.data() + filled_;
    const size_t room = text_.size() - filled_;
    const int length =
        outcome.written()
            ? std::snprintf(line, room, "crossrail: %s: flight recorder of engine '%s' is in %s\n", reason,
                            core.name().c_str(), outcome.path.data())
            : std::snprintf(line, room,
                            "crossrail: %s: flight recorder of engine '%s' was not written to %s: errno %d\n", reason,
                            core.name().c_str(), outcome.path.data(), outcome.error);
    if (length > 0 && static_cast<size_t>(length) < room) {
      filled_ += static_cast<size_t>(length);
    } else {
      ++left_out_;
    }
  }
  void say_all() const {
    say({text_.data(), filled_});
    if (left_out_ == 0) return;
    std::array<char, 80> line;
    const int length =
        std::snprintf(line.data(), line.size(), "crossrail: the same was done for %u more engines\n", left_out_);
    say({line.data(), static_cast<size_t>(length)});
  }

 private:
  std::array<char, 32 << 10> text_;
  size_t filled_ = 0;
  uint32_t left_out_ = 0;
};

// False: somebody holds the list of engines and is not going to release it. Messages are printed after the list has
// been released: standard error may be slow.
bool dump_all(const char* reason, std::string_view directory, bool patient) {
  Lines lines;
  const bool visited = EngineCore::visit_live(patient, [&](EngineCore& core) {
    lines.add(core, dump_to_directory(core, directory.empty() ? core.dump_directory() : directory, reason), reason);
  });
  lines.say_all();
  return visited;
}

void on_abort(const char* reason) {
  if (dump_all(reason, {}, false)) return;
  say("crossrail: no flight recorder is written: the list of engines is being changed\n");
}

// --- signals ---

// Never destroyed or closed: a handler may use it at any time.
sem_t* wanted_dumps() {
  static sem_t semaphore;
  static const int made = sem_init(&semaphore, 0, 0);
  (void)made;
  return &semaphore;
}

constinit std::atomic<sem_t*> handler_semaphore{nullptr};
constinit std::atomic<SignalDump*> the_dump{nullptr};

// A signal after which a returning handler would re-execute the failed instruction for ever.
bool is_of_a_crash(int signal_number) {
  return signal_number == SIGSEGV || signal_number == SIGBUS || signal_number == SIGFPE || signal_number == SIGILL;
}

void on_signal(int) {
  const int saved = errno;
  // acquire: pairs with the release in SignalDump's constructor.
  if (sem_t* const semaphore = handler_semaphore.load(std::memory_order_acquire)) sem_post(semaphore);
  errno = saved;
}

}  // namespace

DumpOutcome dump_to_directory(EngineCore& core, std::string_view directory, std::string_view reason) {
  std::array<char, 80> name;
  put_name(core.name(), &name);
  DumpOutcome outcome;
  for (int i = 0; i < kNamesTried; ++i) {
    const int number = last_number.fetch_add(1, std::memory_order_relaxed) + 1;
    std::snprintf(outcome.path.data(), outcome.path.size(), "%.*s/crossrail-%s-%d-%d.flight",
                  static_cast<int>(directory.size()), directory.data(), name.data(), getpid(), number);
    FileSink file(outcome.path.data(), FileSink::Target::kNew);
    outcome.error = file.error();
    if (outcome.error == EEXIST) continue;  // left by an earlier process with our pid
    if (outcome.error == 0) core.dump(reason, &file);
    outcome.error = file.finish();
    break;
  }
  return outcome;
}

void dump_on_failed_assert() { set_assert_hook(&on_abort); }

SignalDump::SignalDump(int signal_number, std::string directory)
    : signal_number_(signal_number), directory_(std::move(directory)), owner_pid_(getpid()) {
  constexpr size_t kDirectoryBytesMax = 512;
  if (directory_.size() > kDirectoryBytesMax) throw UsageError("directory is a path of more than 512 bytes");
  if (is_of_a_crash(signal_number)) {
    throw UsageError(
        "signum = " + std::to_string(signal_number) +
        " is raised by a crash, which would happen again as soon as its handler returned: choose another signum");
  }
  struct sigaction before{};
  if (sigaction(signal_number, nullptr, &before) != 0)
    throw UsageError("signum = " + std::to_string(signal_number) + " is not a signal that can be handled");
  // acquire: pairs with the release at the end: the object is complete.
  SignalDump* other = the_dump.load(std::memory_order_acquire);
  if (other != nullptr && other->owner_pid_ == getpid())
    throw UsageError("signal " + std::to_string(other->signal_number_) + " dumps already: close() that first");
  const bool is_ours = before.sa_handler == &on_signal;  // inherited from our parent by a fork
  if (!is_ours && before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    throw UsageError("signal " + std::to_string(signal_number) + " has a handler already: choose another signum");
  sem_t* const semaphore = wanted_dumps();
  while (sem_trywait(semaphore) == 0) {  // left over from a signal that came too late for the previous one
  }
  thread_ = start_thread([this] { run(); });
  // release: pairs with the acquire in on_signal(): the semaphore is initialised.
  handler_semaphore.store(semaphore, std::memory_order_release);
  struct sigaction action{};
  action.sa_handler = &on_signal;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  if (sigaction(signal_number, &action, nullptr) != 0) {
    const int code = errno;
    stopping_.store(true, std::memory_order_release);  // pairs with the acquire in run(), as does close()'s
    sem_post(semaphore);
    thread_.join();
    throw UsageError("signum = " + std::to_string(signal_number) + " cannot be handled: " + std::strerror(code));
  }
  the_dump.store(this, std::memory_order_release);
}

void SignalDump::close() {
  if (stopping_.exchange(true, std::memory_order_acq_rel)) return;
  // acquire: pairs with the release in the constructor. If another is installed, this is a forked child that has
  // constructed its own, and the handler may belong to that one.
  if (the_dump.load(std::memory_order_acquire) == this) {
    struct sigaction action{};
    // Somebody else may have taken over the signal since.
    if (sigaction(signal_number_, nullptr, &action) == 0 && action.sa_handler == &on_signal) {
      action = {};
      action.sa_handler = SIG_DFL;
      sigaction(signal_number_, &action, nullptr);
    }
    the_dump.store(nullptr, std::memory_order_release);  // last: a new one must find the signal free
  }
  if (getpid() != owner_pid_) {
    leak_thread(thread_);
    return;
  }
  sem_post(wanted_dumps());
  thread_.join();
}

void SignalDump::run() {
  pthread_setname_np(pthread_self(), "crossrail-dump");
  for (;;) {
    if (sem_wait(wanted_dumps()) != 0) continue;  // interrupted
    if (stopping_.load(std::memory_order_acquire)) return;
    std::array<char, 32> reason;
    std::snprintf(reason.data(), reason.size(), "signal %d", signal_number_);
    dump_all(reason.data(), directory_, true);
  }
}

}  // namespace crossrail
