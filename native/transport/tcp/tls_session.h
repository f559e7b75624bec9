// TLS on one connection: encrypts what we send and decrypts what arrives, on a non-blocking socket. The worker never
// waits for it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/tcp/tls_context.h"
#include "util/sha256.h"

namespace crossrail::tcp {

// Lifecycle: 1. handshake(), until it returns kDone. 2. receive() and seal(). 3. over, with the first error.
// Encrypted bytes are kept in a buffer of ours until flush() has handed them to the kernel, so OpenSSL never has to
// wait for room.
// Invariants: until lift_limit() it reads at most kHandshakeBytesMax bytes in all. The buffer holds at most
// kUnsentBytesMax. Progress holder.
class TlsSession {
 public:
  enum class Side : uint8_t { kInitiator, kAcceptor };
  enum class Step : uint8_t { kMore, kDone, kFailed, kGone };
  // What TLS and our handshake after it need: two certificate chains and four short messages.
  static constexpr uint64_t kHandshakeBytesMax = 32 << 10;
  static constexpr uint64_t kIdleBytesMax = 64 << 10;  // more than two records: data always makes progress
  // One seal(), one flight, and answers to a peer that requests new keys.
  static constexpr size_t kUnsentBytesMax = 256 << 10;

  // fd: a connected socket, not owned. Throws TransportError if there is no memory.
  TlsSession(std::shared_ptr<TlsContext> context, Side side, int fd);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Continues as far as the received bytes allow. kFailed: one side rejects the other, see trouble(). kGone: the
  // connection was closed or broke.
  Step handshake();
  // Until lift_limit(), reads only as many bytes from the socket as it needs.
  // After the handshake: the peer's certificate and keys.
  bool is_named(std::string_view name) const;  // one of its DNS names is this, or a wildcard that covers it
  Digest binding() const;                      // unique to this session, known to both ends (RFC 9266)
  const char* cipher() const;

  // The peer's identity is established.
  void lift_limit();
  // Until the next call, takes at most this many bytes from the socket, and at most kIdleBytesMax consecutive bytes
  // that carry no data: a peer may send new keys for ever.
  void begin_turn(uint64_t bytes) {
    turn_left_ = bytes;
    idle_left_ = kIdleBytesMax;
  }
  // Like recvmsg(2) with MSG_DONTWAIT: fills the views in turn. 0: the connection was closed. -1: errno EAGAIN, or why
  // it broke; EPROTO: see trouble().
  ssize_t receive(std::span<const iovec> views);
  // Whether bytes are buffered here that the socket will not report.
  bool holds_more() const;
  // Whether receive() met the end of the stream after bytes that it returned first: the socket may not report it again.
  bool end_waits() const { return end_waits_; }
  // Encrypts a part of the views' bytes, in order. -1: it broke, see trouble().
  ssize_t seal(std::span<const iovec> views);
  bool has_unsent() const { return sent_ < unsent_.size(); }
  // Hands the kernel what is encrypted. Like send(2): -1 and errno, also if only a part of it fit (EAGAIN).
  int flush();

  // Why it failed, one line.
  const std::string& trouble() const { return trouble_; }

 private:
  friend struct TlsInsides;  // for tests: what no session of ours does by itself
  static constexpr uint64_t kNoLimit = UINT64_MAX;
  static const bio_method_st* bio_method(const TlsCalls& calls);
  static int on_bio_read(bio_st* bio, char* data, size_t size, size_t* done);
  static int on_bio_write(bio_st* bio, const char* data, size_t size, size_t* done);
  static long on_bio_ctrl(bio_st* bio, int command, long number, void* pointer);
  // The last call did not succeed. errno as of receive().
  ssize_t failed();
  bool put(const void* data, size_t size);
  bool change_keys();

  const std::shared_ptr<TlsContext> context_;
  const TlsCalls& calls_;
  const int fd_;
  ssl_st* ssl_ = nullptr;
  // The end of the incoming stream. Invariant: at most one of the two is set, and then nothing more is read from the
  // socket.
  bool is_closed_ = false;  // by the peer
  int error_ = 0;           // errno of the socket
  bool end_waits_ = false;
  uint64_t bytes_left_ = kHandshakeBytesMax;
  uint64_t turn_left_ = UINT64_MAX;
  uint64_t idle_left_ = kIdleBytesMax;
  uint64_t sealed_bytes_ = 0;  // with the current keys
  std::vector<std::byte> unsent_;
  size_t sent_ = 0;  // part of unsent_ that is sent
  std::string trouble_;
};

}  // namespace crossrail::tcp
