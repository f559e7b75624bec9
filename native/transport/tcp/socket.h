// A connected socket, with its TLS if any; and what all our sockets have in common.
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
  std::unique_ptr<TlsSession> tls;  // null: bytes travel as they are

  // Like recvmsg(2).
  ssize_t receive(std::span<const iovec> views) const;
  // A whole short message, after nothing else that is still on its way. Under TLS it may wait for room in the socket,
  // see has_unsent(). False: see error_text().
  bool send_message(std::span<const uint8_t> message) const;
  bool has_unsent() const { return tls && tls->has_unsent(); }
  // Hands the kernel what waits, as far as there is room. False: the connection broke.
  bool flush() const;
  // Why the last call failed: errno, or what TLS says of EPROTO.
  std::string error_text() const;
  // Closes such that the peer gets our last words: with unread bytes the kernel would reset the connection.
  void close_gently();
};

// Whether this errno of a send says: not now.
bool is_full(int error);

// Options that every connection of ours has. unacknowledged_ms: after this long without the peer's kernel answering, it
// is broken.
void tune_socket(int fd, int64_t unacknowledged_ms);
void bind_to_netdev(int fd, const std::string& netdev);
// No pacing: on the way from this machine to itself it only costs.
void tune_for_loopback(int fd);
// Before it connects: neither end sends packets of more than 576 bytes, which every way carries (RFC 9293, 3.7.1).
void limit_segments(int fd);

// So much of what was sent has arrived, says the peer's kernel. 0 where ours does not tell (before Linux 4.1).
uint64_t acknowledged_bytes(int fd);
// The shortest that the kernel has seen; 0: it does not say.
int64_t round_trip_ns(int fd);

// The address a socket's other end has, for messages.
std::string peer_text(int fd);
socklen_t to_sockaddr(const Endpoint& endpoint, sockaddr_storage* out);
Endpoint from_sockaddr(const sockaddr_storage& address);

}  // namespace crossrail::tcp
