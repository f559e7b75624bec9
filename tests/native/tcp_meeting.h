// Both halves of a handshake under TLS in one thread, and between them a way whose every byte the test passes on.
#pragma once

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tls_files.h"
#include "transport/identity.h"
#include "transport/tcp/connect.h"

namespace crossrail::tcp {

// The connector's socket ends at near(); the acceptor has one end of a pair, far() is the other.
class Meeting final : public Connector::Owner, public Acceptor::Owner {
 public:
  Meeting() : context_(TestTls().context()) {
    initiator_ = make_identity("initiator", transport_bit(TransportKind::kTcp), 1);
    acceptor_ = initiator_;
    acceptor_.name = "acceptor";
    acceptor_.incarnation[0] ^= 1;
    Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in here{};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof here;
    REQUIRE(bind(listener.get(), reinterpret_cast<sockaddr*>(&here), size) == 0);
    REQUIRE(listen(listener.get(), 1) == 0);
    REQUIRE(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&here), &size) == 0);
    const Endpoint to{.family = 4, .ip = {127, 0, 0, 1}, .port = ntohs(here.sin_port), .prefix_bits = 8};
    initiator_.endpoints = acceptor_.endpoints = {to};
    Rail from;
    from.endpoint = to;
    connector_ = std::make_unique<Connector>(&poller, this, from, to, purpose(), 10'000);
    near_ = Fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    REQUIRE(near_);
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    far_ = Fd(pair[0]);
    acceptor_fd_ = pair[1];
    taker_ = std::make_unique<Acceptor>(&poller, this, Fd(pair[1]), "the relay", key(), acceptor_.incarnation, context_,
                                        kNoDeadline);
  }

  // Up to so many bytes each way, and both halves look at them. False: nothing was there.
  bool pass_on(size_t bytes) {
    const bool moved = move(near_, far_, bytes);
    const bool moved_back = move(far_, near_, bytes);
    return poller.poll() > 0 || moved || moved_back;
  }
  // From who connects to who accepts, or back.
  bool pass_forward(size_t bytes) { return move(near_, far_, bytes); }
  bool pass_back(size_t bytes) { return move(far_, near_, bytes); }
  template <typename Condition>
  void pass_on_until(size_t bytes, Condition condition) {
    const Deadline deadline = now_ns() + 20'000'000'000;
    while (!condition() && now_ns() < deadline) pass_on(bytes);
    REQUIRE(condition());
  }

  const Fd& near() const { return near_; }
  const Fd& far() const { return far_; }
  void hang_up_near() { near_.reset(); }
  int acceptor_fd() const { return acceptor_fd_; }
  // The connector's own, which it tells nobody.
  int connector_fd() const {
    sockaddr_in wanted{}, seen{};
    socklen_t size = sizeof wanted;
    REQUIRE(getpeername(near_.get(), reinterpret_cast<sockaddr*>(&wanted), &size) == 0);
    for (int fd = 0; fd < 4096; ++fd) {
      size = sizeof seen;
      const bool is_named = getsockname(fd, reinterpret_cast<sockaddr*>(&seen), &size) == 0;
      if (is_named && seen.sin_family == AF_INET && seen.sin_port == wanted.sin_port) return fd;
    }
    FAIL("the connector has no socket");
    return -1;
  }
  Bytes hello() const { return purpose().hello; }
  Digest key() const { return handshake_key("", acceptor_.incarnation); }
  const Address& acceptor_address() const { return acceptor_; }
  std::shared_ptr<TlsContext> context() const { return context_; }

  Poller poller;
  std::optional<ConnectResult> result;  // of the connector
  std::optional<Socket> accepted;       // by the acceptor, which has said so
  std::vector<std::string> strangers;   // what the acceptor says of who comes

 private:
  Connector::Purpose purpose() const {
    Hello hello;
    hello.target_tag = target_tag(acceptor_.incarnation);
    hello.link_id = 1;
    hello.epoch = 1;
    hello.sender = initiator_;
    return {.target = std::make_shared<const Address>(acceptor_),
            .key = key(),
            .hello = encode(hello),
            .tls = context_,
            .deadline = kNoDeadline,
            .same_machine = true};
  }
  static bool move(const Fd& from, const Fd& to, size_t bytes) {
    std::array<uint8_t, 4096> buffer;
    const ssize_t got = recv(from.get(), buffer.data(), std::min(bytes, buffer.size()), MSG_DONTWAIT);
    if (got <= 0) return false;
    REQUIRE(send(to.get(), buffer.data(), static_cast<size_t>(got), MSG_DONTWAIT | MSG_NOSIGNAL) == got);
    return true;
  }
  void on_connect_result(ConnectResult ended) override { result = std::move(ended); }
  std::optional<Refusal> check_hello(const Hello&) override { return std::nullopt; }
  void on_accepted(Acceptor&, const Hello&, Socket socket) override {
    CHECK(Acceptor::accept(socket));
    accepted = std::move(socket);
  }
  void on_stranger(RefusalCode, const std::string&, const std::string& what) override { strangers.push_back(what); }

  const std::shared_ptr<TlsContext> context_;
  Address initiator_;
  Address acceptor_;
  Fd near_;
  Fd far_;
  int acceptor_fd_ = -1;
  std::unique_ptr<Connector> connector_;
  std::unique_ptr<Acceptor> taker_;
};

}  // namespace crossrail::tcp
