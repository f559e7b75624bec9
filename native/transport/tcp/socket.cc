#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace crossrail::tcp {

namespace {

// Kernel probes of idle connections: a peer that is unplugged while nothing is in flight is noticed after about half a
// minute.
constexpr int kKeepIdleS = 15;
constexpr int kKeepIntervalS = 5;
constexpr int kKeepProbes = 3;
constexpr int kShortSegmentBytes = 536;
// Offset of tcpi_bytes_acked in the kernel's tcp_info. glibc's struct ends before it, and linux/tcp.h cannot be
// included together with netinet/tcp.h.
constexpr size_t kBytesAckedAt = 120;
constexpr size_t kRoundTripMinAt = 148;  // tcpi_min_rtt, us
constexpr size_t kTcpInfoBytesMax = 256;

void set(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

}  // namespace

ssize_t Socket::receive(std::span<const iovec> views) const {
  if (tls) return tls->receive(views);
  // recv is cheaper than recvmsg, and most calls find nothing.
  if (views.size() == 1) return recv(fd.get(), views[0].iov_base, views[0].iov_len, MSG_DONTWAIT);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(views.data());  // the kernel only reads them
  message.msg_iovlen = views.size();
  return recvmsg(fd.get(), &message, MSG_DONTWAIT);
}

bool Socket::send_message(std::span<const uint8_t> message) const {
  // Everything sent before has been read by now, so the message fits into the empty socket buffer. TLS flights, with
  // their certificates, may not fit.
  if (!tls) {
    return ::send(fd.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
           static_cast<ssize_t>(message.size());
  }
  const iovec view{const_cast<uint8_t*>(message.data()), message.size()};
  return tls->seal({&view, 1}) == static_cast<ssize_t>(message.size()) && flush();
}

bool Socket::flush() const { return !tls || tls->flush() == 0 || is_full(errno); }

// ENOBUFS: the kernel is short of memory for the moment.
bool is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS; }

std::string Socket::error_text() const {
  if (tls && !tls->trouble().empty()) return "TLS: " + tls->trouble();
  return std::strerror(errno);
}

void Socket::close_gently() {
  ::shutdown(fd.get(), SHUT_WR);
  std::array<uint8_t, 4096> rest;
  for (int i = 0; i < 8 && recv(fd.get(), rest.data(), rest.size(), MSG_DONTWAIT) > 0; ++i) {
  }
  fd.reset();
}

void tune_socket(int fd, int64_t unacknowledged_ms) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepProbes);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min<int64_t>(unacknowledged_ms, 1 << 30)));
}

void bind_to_netdev(int fd, const std::string& netdev) {
  setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, netdev.c_str(), static_cast<socklen_t>(netdev.size() + 1));
}

void tune_for_loopback(int fd) {
  static constexpr char kReno[] = "reno";  // always allowed; bbr and similar algorithms pace
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kReno, sizeof kReno - 1);
}

void limit_segments(int fd) { set(fd, IPPROTO_TCP, TCP_MAXSEG, kShortSegmentBytes); }

template <typename Value>
Value tcp_info(int fd, size_t at, Value otherwise) {
  std::array<std::byte, kTcpInfoBytesMax> info;
  socklen_t size = info.size();
  Value value = otherwise;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info.data(), &size) != 0) return otherwise;
  if (size >= at + sizeof value) std::memcpy(&value, &info[at], sizeof value);
  return value;
}

uint64_t acknowledged_bytes(int fd) { return tcp_info<uint64_t>(fd, kBytesAckedAt, 0); }

int64_t round_trip_ns(int fd) {
  const auto us = tcp_info<uint32_t>(fd, kRoundTripMinAt, 0);
  return us == UINT32_MAX ? 0 : int64_t{us} * 1000;  // nothing acknowledged yet
}

socklen_t to_sockaddr(const Endpoint& endpoint, sockaddr_storage* out) {
  std::memset(out, 0, sizeof *out);
  if (endpoint.family == 6) {
    auto* address = reinterpret_cast<sockaddr_in6*>(out);
    address->sin6_family = AF_INET6;
    address->sin6_port = htons(endpoint.port);
    std::memcpy(&address->sin6_addr, endpoint.ip.data(), 16);
    return sizeof *address;
  }
  auto* address = reinterpret_cast<sockaddr_in*>(out);
  address->sin_family = AF_INET;
  address->sin_port = htons(endpoint.port);
  std::memcpy(&address->sin_addr, endpoint.ip.data(), 4);
  return sizeof *address;
}

Endpoint from_sockaddr(const sockaddr_storage& storage) {
  Endpoint endpoint{};
  if (storage.ss_family == AF_INET6) {
    const auto* address = reinterpret_cast<const sockaddr_in6*>(&storage);
    endpoint.family = 6;
    endpoint.port = ntohs(address->sin6_port);
    endpoint.prefix_bits = 128;
    std::memcpy(endpoint.ip.data(), &address->sin6_addr, 16);
  } else {
    const auto* address = reinterpret_cast<const sockaddr_in*>(&storage);
    endpoint.family = 4;
    endpoint.port = ntohs(address->sin_port);
    endpoint.prefix_bits = 32;
    std::memcpy(endpoint.ip.data(), &address->sin_addr, 4);
  }
  return endpoint;
}

std::string peer_text(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return "an unknown address";
  return to_text(from_sockaddr(storage));
}

}  // namespace crossrail::tcp
