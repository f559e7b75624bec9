// Sockets that libfabric's tcp provider accepts and then forgets.
#pragma once

#include <sys/types.h>

#include <vector>

#include "transport/ofi/domain.h"

namespace crossrail::ofi {

// A peer that is about to dial has only a socket, without an endpoint, until its request has been read. tcp (2.5 at
// least) keeps no list of those: when the passive endpoint is closed they stay open for as long as the process lives,
// and the other end waits. So they are found by their local address before that, and closed after it.
// Threads: any; while no endpoint made from a request at that address is open.
class Strays {
 public:
  explicit Strays(const Name& address);
  // To be called once libfabric no longer knows them. Sockets that it has closed itself are left alone.
  void close() const;

 private:
  struct Stray {
    int fd;
    ino_t inode;  // identifies the socket: the descriptor number may have been reused by then
  };
  std::vector<Stray> found_;
};

}  // namespace crossrail::ofi
