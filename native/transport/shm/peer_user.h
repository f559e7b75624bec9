// Who is at the other end of a unix socket, seen through user namespaces, and whom shm's memory is for: processes of
// one user, and root's.
#pragma once

#include <sys/socket.h>

#include <string>

namespace crossrail::shm {

// The process at the other end; the ids of nobody if the kernel does not tell.
ucred peer_of(int socket);

// Whether we let that process in.
bool is_let_in(const ucred& peer);

// Why the engine behind our connected socket does not let us in; empty: it does.
std::string why_not_let_in(int socket);

}  // namespace crossrail::shm
