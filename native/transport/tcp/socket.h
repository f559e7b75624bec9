// Sockets and their addresses.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "transport/descriptor.h"

namespace crossrail::tcp {

// Options that every connection of ours has. unacknowledged_ms: after this long without the peer's kernel answering, it is broken.
void tune_socket(int fd, int64_t unacknowledged_ms);
void bind_to_netdev(int fd, const std::string& netdev);
// No pacing: on the way from this machine to itself it only costs.
void tune_for_loopback(int fd);

// The address a socket's other end has, for messages.
std::string peer_text(int fd);
socklen_t to_sockaddr(const Endpoint& endpoint, sockaddr_storage* out);
Endpoint from_sockaddr(const sockaddr_storage& address);

}  // namespace crossrail::tcp
