// Two sessions of TLS at the ends of a pair of sockets.
#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <memory>
#include <vector>

#include "tls_files.h"
#include "transport/tcp/tls_session.h"
#include "util/memory_map.h"

namespace crossrail::tcp {

using Side = TlsSession::Side;
using Step = TlsSession::Step;

// Two sessions at the ends of a pair of sockets.
struct Ends {
  explicit Ends(uint64_t key_bytes_max = TlsContext::kKeyBytesMax) {
    context = TestTls().context();
    context->key_bytes_max = key_bytes_max;
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    near_fd = Fd(fds[0]);
    far_fd = Fd(fds[1]);
    near = std::make_unique<TlsSession>(context, Side::kInitiator, near_fd.get());
    far = std::make_unique<TlsSession>(context, Side::kAcceptor, far_fd.get());
  }
  void shake_hands() {
    Step ours = Step::kMore;
    Step theirs = Step::kMore;
    for (int i = 0; i < 10 && !(ours == Step::kDone && theirs == Step::kDone); ++i) {
      if (ours == Step::kMore) ours = near->handshake();
      REQUIRE(near->flush() == 0);
      if (theirs == Step::kMore) theirs = far->handshake();
      REQUIRE(far->flush() == 0);
    }
    REQUIRE(ours == Step::kDone);
    REQUIRE(theirs == Step::kDone);
    near->lift_limit();
    far->lift_limit();
  }
  std::shared_ptr<TlsContext> context;
  Fd near_fd, far_fd;
  std::unique_ptr<TlsSession> near, far;
};

inline iovec view_of(std::vector<std::byte>& bytes, size_t from, size_t size) { return {bytes.data() + from, size}; }

inline std::vector<std::byte> numbered(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

}  // namespace crossrail::tcp
