#include "bench/socket_io.h"

#include <limits.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "util/errors.h"

namespace crossrail::bench {
namespace {

// How long a blocking call sleeps before it checks the guard.
constexpr suseconds_t kLookPeriodUs = 200'000;

size_t of_call(size_t length_bytes, size_t chunk_bytes) {
  return chunk_bytes == 0 ? length_bytes : std::min(length_bytes, chunk_bytes);
}

void set_timeout(int fd, int option) {
  const timeval period{.tv_sec = 0, .tv_usec = kLookPeriodUs};
  if (setsockopt(fd, SOL_SOCKET, option, &period, sizeof period) != 0) {
    throw_errno("setsockopt", "cannot bound how long a bare socket blocks");
  }
}

}  // namespace

SocketIo::SocketIo(int fd, SocketWait wait, Guard& guard)
    : fd_(fd), flags_(MSG_NOSIGNAL | (wait == SocketWait::kSpin ? MSG_DONTWAIT : 0)), guard_(guard) {
  if (wait == SocketWait::kSpin) return;
  set_timeout(fd, SO_RCVTIMEO);
  set_timeout(fd, SO_SNDTIMEO);
}

size_t SocketIo::moved(const char* call, ssize_t result) {
  if (result > 0) return static_cast<size_t>(result);
  if (result == 0) throw TransportError(call, 0, "the other end of a bare socket was closed");
  if (errno != EAGAIN && errno != EINTR) throw_errno(call, "a bare socket failed");
  if ((flags_ & MSG_DONTWAIT) != 0) {
    guard_.tick();
  } else {
    guard_.look();
  }
  return 0;
}

void SocketIo::send_all(const std::byte* bytes, size_t length_bytes, size_t chunk_bytes) {
  while (length_bytes > 0) {
    const size_t sent = moved("send", send(fd_, bytes, of_call(length_bytes, chunk_bytes), flags_));
    bytes += sent;
    length_bytes -= sent;
  }
}

void SocketIo::recv_all(std::byte* bytes, size_t length_bytes, size_t chunk_bytes) {
  while (length_bytes > 0) {
    const size_t got = moved("recv", recv(fd_, bytes, of_call(length_bytes, chunk_bytes), flags_));
    bytes += got;
    length_bytes -= got;
  }
}

size_t SocketIo::recv_some(std::byte* bytes, size_t room_bytes) {
  while (true) {
    const size_t got = moved("recv", recv(fd_, bytes, room_bytes, flags_));
    if (got > 0) return got;
  }
}

template <typename Call>
void SocketIo::move_all(std::span<iovec> parts, const char* name, Call call) {
  while (!parts.empty()) {
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = std::min<size_t>(parts.size(), IOV_MAX);
    size_t left = moved(name, call(message));
    while (!parts.empty() && left >= parts[0].iov_len) {
      left -= parts[0].iov_len;
      parts = parts.subspan(1);
    }
    if (left == 0) continue;
    parts[0].iov_base = static_cast<std::byte*>(parts[0].iov_base) + left;
    parts[0].iov_len -= left;
  }
}

void SocketIo::send_all(std::span<iovec> parts) {
  move_all(parts, "sendmsg", [this](msghdr& message) { return sendmsg(fd_, &message, flags_); });
}

void SocketIo::recv_all(std::span<iovec> parts) {
  move_all(parts, "recvmsg", [this](msghdr& message) { return recvmsg(fd_, &message, flags_); });
}

void SocketAcks::await(uint64_t total) {
  while (taken_ < total) {
    held_bytes_ += io_.recv_some(buffer_ + held_bytes_, sizeof buffer_ - held_bytes_);
    const size_t whole = held_bytes_ / sizeof(uint64_t);
    if (whole == 0) continue;
    std::memcpy(&taken_, buffer_ + (whole - 1) * sizeof(uint64_t), sizeof(uint64_t));
    held_bytes_ -= whole * sizeof(uint64_t);
    std::memmove(buffer_, buffer_ + whole * sizeof(uint64_t), held_bytes_);
  }
}

void send_ack(SocketIo& io, uint64_t total) { io.send_all(reinterpret_cast<const std::byte*>(&total), sizeof total); }

}  // namespace crossrail::bench
