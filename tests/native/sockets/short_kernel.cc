// A kernel that is short of memory, for LD_PRELOAD: of the calls on sockets, some fail as they may then.
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <initializer_list>

#define CROSSRAIL_CALL extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<uint32_t> g_percent{0};
std::atomic<uint64_t> g_calls{0};

// The same for the n-th call of each run.
uint32_t draw() {
  uint64_t value = (g_calls.fetch_add(1) + 1) * 0x9e3779b97f4a7c15;
  value ^= value >> 29;
  value *= 0xbf58476d1ce4e5b9;
  return static_cast<uint32_t>(value >> 33);
}

// True, with one of these as errno: this call fails.
bool fails(std::initializer_list<int> errors) {
  if (draw() % 100 >= g_percent.load()) return false;
  errno = errors.begin()[draw() % errors.size()];
  return true;
}

template <typename Call>
Call* real(Call*, const char* name) {
  return reinterpret_cast<Call*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// How many of the calls fail from now on.
CROSSRAIL_CALL void fail_calls(uint32_t percent) noexcept { g_percent = percent; }

CROSSRAIL_CALL ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  static auto* const call = real(&send, "send");
  return fails({EAGAIN, ENOBUFS}) ? -1 : call(fd, data, bytes, flags);
}

CROSSRAIL_CALL ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static auto* const call = real(&sendmsg, "sendmsg");
  return fails({EAGAIN, ENOBUFS}) ? -1 : call(fd, message, flags);
}

CROSSRAIL_CALL ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  static auto* const call = real(&recv, "recv");
  return fails({EAGAIN}) ? -1 : call(fd, data, bytes, flags);
}

CROSSRAIL_CALL ssize_t recvmsg(int fd, msghdr* message, int flags) {
  static auto* const call = real(&recvmsg, "recvmsg");
  return fails({EAGAIN}) ? -1 : call(fd, message, flags);
}

CROSSRAIL_CALL int accept4(int fd, sockaddr* address, socklen_t* bytes, int flags) {
  static auto* const call = real(&accept4, "accept4");
  return fails({ECONNABORTED, ENOBUFS, ENOMEM}) ? -1 : call(fd, address, bytes, flags);
}
