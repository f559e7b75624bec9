// A connected socket, with its TLS session if any; and helpers for all our sockets.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/descriptor.h"
#include "transport/tcp/tls_session.h"
#include "util/memory_map.h"

namespace crossrail::tcp {

// Non-blocking. Both halves of the handshake, and the connection after it, read and write through it.
struct Socket {
  Fd fd;
  std::unique_ptr<TlsSession> tls;  // null: plaintext

  // Like recvmsg(2).
  ssize_t receive(std::span<const iovec> views) const;
  // Sends a whole short message; nothing else may be unsent. Under TLS it may have to wait for room in the socket, see
  // has_unsent(). False: see error_text().
  bool send_message(std::span<const uint8_t> message) const;
  bool has_unsent() const { return tls && tls->has_unsent(); }
  // Hands the kernel what is waiting, as far as there is room. False: the connection broke.
  bool flush() const;
  // Why the last call failed: errno, or TLS's explanation of EPROTO.
  std::string error_text() const;
  // Closes such that the peer receives our last words: with unread bytes the kernel would reset the connection.
  void close_gently();
};

// Whether this errno of a send means "not now".
bool is_full(int error);

// Options for all our connections. unacknowledged_ms: if the peer's kernel does not answer for this long, the
// connection is broken.
void tune_socket(int fd, int64_t unacknowledged_ms);
void bind_to_netdev(int fd, const std::string& netdev);
// No pacing: within one machine it only costs.
void tune_for_loopback(int fd);
// Before connecting: neither end sends packets of more than 576 bytes, which every path carries (RFC 9293, 3.7.1).
void limit_segments(int fd);

// How much of what was sent the peer's kernel has acknowledged. 0 if ours does not tell (before Linux 4.1).
uint64_t acknowledged_bytes(int fd);
// The shortest round trip that the kernel has seen; 0: unknown.
int64_t round_trip_ns(int fd);

// The address of a socket's other end, for messages.
std::string peer_text(int fd);
socklen_t to_sockaddr(const Endpoint& endpoint, sockaddr_storage* out);
Endpoint from_sockaddr(const sockaddr_storage& address);

}  // namespace crossrail::tcp
