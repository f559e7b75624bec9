// Sockets that libfabric's tcp provider accepts and then forgets.
#pragma once

#include <sys/types.h>

#include <vector>

#include "transport/ofi/domain.h"

namespace crossrail::ofi {

// Somebody who is about to dial is a socket without an endpoint until its request has been read. tcp (of 2.5 at least)
// has no list of those: when the passive endpoint is closed they stay open for as long as the process lives, and
// whoever is at the other end waits. So they are looked for by their local address before that, and closed after it.
// Threads: any; for as long as no endpoint made of a request at that address is open.
class Strays {
 public:
  explicit Strays(const Name& address);
  // Once nothing of libfabric's knows them any more. Those that it has closed by itself are left alone.
  void close() const;

 private:
  struct Stray {
    int fd;
    ino_t inode;  // of the socket: the number alone may be another one's by then
  };
  std::vector<Stray> found_;
};

}  // namespace crossrail::ofi
