// The wall clock of one process, moved, and jumping: for LD_PRELOAD. Clocks that count intervals are left alone.
//
// MOVED_CLOCK="OFFSET JUMP": seconds. It is OFFSET ahead, and each second of CLOCK_MONOTONIC JUMP more, or
// less.
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>

#define CROSSRAIL_CALL extern "C" __attribute__((visibility("default")))

namespace {

struct Moved {
  long offset_s = 0;
  long jump_s = 0;
};

Moved read_moved() {
  Moved moved;
  const char* const text = std::getenv("MOVED_CLOCK");
  if (text == nullptr || std::sscanf(text, "%ld %ld", &moved.offset_s, &moved.jump_s) != 2) std::abort();
  return moved;
}

int true_time(clockid_t clock, timespec* at) { return static_cast<int>(syscall(SYS_clock_gettime, clock, at)); }

int wall_time(clockid_t clock, timespec* at) {
  static const Moved moved = read_moved();
  timespec since_boot;
  if (true_time(CLOCK_MONOTONIC, &since_boot) != 0 || true_time(clock, at) != 0) return -1;
  at->tv_sec += moved.offset_s + (since_boot.tv_sec % 2 == 0 ? moved.jump_s : -moved.jump_s);
  return 0;
}

}  // namespace

CROSSRAIL_CALL int clock_gettime(clockid_t clock, timespec* at) noexcept {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ? wall_time(clock, at) : true_time(clock, at);
}

CROSSRAIL_CALL int gettimeofday(timeval* at, void*) noexcept {
  timespec exact;
  if (wall_time(CLOCK_REALTIME, &exact) != 0) return -1;
  at->tv_sec = exact.tv_sec;
  at->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

CROSSRAIL_CALL time_t time(time_t* at) noexcept {
  timespec exact;
  if (wall_time(CLOCK_REALTIME, &exact) != 0) return -1;
  if (at != nullptr) *at = exact.tv_sec;
  return exact.tv_sec;
}
