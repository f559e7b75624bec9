// Connections before their first frame: making them, accepting them, and the handshake on both sides.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/tcp/handshake.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/socket.h"
#include "util/clock.h"
#include "util/memory_map.h"

namespace crossrail::tcp {

class Connection;

// One local address that connections leave from and arrive at.
struct Rail {
  Endpoint endpoint;             // with the port of the listener
  std::string device;            // the interface that has the address
  std::string netdev;            // the same if it was requested by that name, else empty
  bool bound_to_netdev = false;  // connections may leave through this interface only
  Fd listener;
};

// Finds and opens the rails: `names` are IP addresses or interfaces. Without names, takes `count` addresses of this
// host, fastest interfaces first, or loopback if there is nothing else. Throws UsageError or TransportError.
std::vector<Rail> open_rails(const std::vector<std::string>& names, uint32_t count, uint16_t port);

// Pairs our rails with the peer's: rails with a common subnet among themselves, else by index; every rail of the side
// with more is used. Pure; both sides compute the same.
struct RailPair {
  uint32_t rail;
  uint32_t peer_rail;
  bool operator==(const RailPair&) const = default;
};
std::vector<RailPair> pair_rails(const std::vector<Endpoint>& ours, const std::vector<Endpoint>& theirs);

// A hint to append to "connection refused" if the address of the peer's rail leads back to our own host while the peer
// is on another; else empty.
std::string leads_back_text(const Address& own, const Address& peer, uint32_t rail);

// An incoming handshake message, read to its last byte and no further.
class MessageReader {
 public:
  enum class State : uint8_t { kMore, kWhole, kForeign, kClosed, kFailed };
  State read(const Socket& socket);
  const Bytes& message() const { return bytes_; }
  uint16_t version() const { return version_; }
  int error() const { return error_; }  // for kFailed: errno
  void clear() { bytes_.clear(); }

 private:
  Bytes bytes_;
  size_t wanted_ = kHandshakeHeadBytes;
  uint16_t version_ = 0;
  int error_ = 0;
};

// Asks epoll to report room in a socket while something waits to be sent, most likely a TLS flight.
class RoomWatch {
 public:
  void update(Poller* poller, const Socket& socket, Pollable* what, uint32_t events);

 private:
  bool is_on_ = false;
};

// How an attempt to connect ended.
struct ConnectResult {
  enum class Kind : uint8_t {
    kUp,
    kNobodyThere,  // the port is closed: the engine is gone
    kTimeout,
    kRefused,  // by an engine, see `code`
    kFailed
  };
  Kind kind = Kind::kFailed;
  RefusalCode code = RefusalCode::kMalformed;
  std::string text;
  bool lacked_here = false;                // kFailed: this process lacked descriptors or memory
  bool was_taken = false;                  // kTimeout: somebody answered, but the handshake was not finished
  Socket socket;                           // kUp: a connection of our own
  std::shared_ptr<Connection> connection;  // kUp: the peer's connection, shared

  // Nobody answered, nor did anybody report that the port is closed.
  bool is_way_down() const { return (kind == Kind::kTimeout && !was_taken) || (kind == Kind::kFailed && !lacked_here); }
};

// The initiator's half. Progress holder. Ends with exactly one on_connect_result.
class Connector final : public Pollable {
 public:
  class Owner {
   public:
    virtual void on_connect_result(ConnectResult result) = 0;

   protected:
    ~Owner() = default;
  };
  // What the connection is for.
  struct Purpose {
    std::shared_ptr<const Address> target;
    Digest key;
    Bytes hello;
    std::shared_ptr<TlsContext> tls;  // null: plaintext
    Deadline deadline;
    bool same_machine;
    bool short_segments = false;
  };
  Connector(Poller* poller, Owner* owner, const Rail& from, const Endpoint& to, Purpose purpose,
            int64_t unacknowledged_ms);
  ~Connector() override;
  void on_events(uint32_t events) override;
  void check_deadline(int64_t now);
  bool ended() const { return ended_; }
  // Its owner has given it up: ends without on_connect_result.
  void hang_up();

 private:
  enum class Step : uint8_t { kConnecting, kTlsAnswer, kTls, kChallenge, kAccept };
  void end(ConnectResult result);
  void fail(ConnectResult::Kind kind, const std::string& text);
  void fail_refused(RefusalCode code, const std::string& text);
  bool send(const Bytes& message);
  bool finish_connecting();
  bool begin_tls();
  bool go_on_with_tls();
  void go_on();
  void sort_answer();
  void on_message();
  void on_challenge(const Bytes& message);

  Poller* const poller_;
  Owner* const owner_;
  const std::string route_;
  const Purpose purpose_;
  const int64_t began_ns_ = now_ns();
  Socket socket_;
  RoomWatch room_;
  std::optional<Digest> binding_;
  Step step_ = Step::kConnecting;
  MessageReader reader_;
  ConnectResult early_;  // a failure that occurred before anybody could be told
  bool failed_early_ = false;
  bool ended_ = false;
};

// The acceptor's half. Invariant: a stranger costs one of these and at most kHandshakeBytesMax bytes, until the
// deadline; a stranger that knows our tag also costs a TlsSession, with TLS.
class Acceptor final : public Pollable {
 public:
  class Owner {
   public:
    // Called before the challenge is sent: whoever may not come in is told why at once.
    virtual std::optional<Refusal> check_hello(const Hello& hello) = 0;
    // The handshake is complete except for our Accept, which the owner sends by calling accept().
    virtual void on_accepted(Acceptor& acceptor, const Hello& hello, Socket socket) = 0;
    virtual void on_stranger(RefusalCode code, const std::string& who, const std::string& what) = 0;

   protected:
    ~Owner() = default;
  };
  // tls: null: plaintext.
  Acceptor(Poller* poller, Owner* owner, Fd fd, std::string who, const Digest& key, const Incarnation& self,
           std::shared_ptr<TlsContext> tls, Deadline deadline);
  ~Acceptor() override;
  void on_events(uint32_t events) override;
  void check_deadline(int64_t now);
  // Turned away to make room.
  void turn_away(RefusalCode code, const std::string& text);
  bool ended() const { return ended_; }
  static bool accept(const Socket& socket);

 private:
  void go_on();
  void on_message();
  void on_start_tls(const Bytes& message);
  void on_hello(const Bytes& message);
  bool go_on_with_tls();
  Proven proven() const;
  void refuse(RefusalCode code, const std::string& text);
  void end();

  Poller* const poller_;
  Owner* const owner_;
  Socket socket_;
  RoomWatch room_;
  const std::string who_;
  const Digest key_;
  const std::array<uint8_t, 8> self_tag_;
  const std::shared_ptr<TlsContext> tls_;
  const Deadline deadline_;
  MessageReader reader_;
  bool in_tls_handshake_ = false;
  std::optional<Digest> binding_;  // of the TLS session, once there is one
  Bytes hello_bytes_;
  std::optional<Hello> hello_;
  Nonce nonce_{};
  bool ended_ = false;
};

}  // namespace crossrail::tcp
