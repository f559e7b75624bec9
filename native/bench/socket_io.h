// Whole sends and receives over one TCP connection, for the bare loops of sockets.cc.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "bench/guard.h"
#include "bench/sockets.h"

namespace crossrail::bench {

// One end. Blocking calls return after a while to check the guard, so that a peer that is gone does not hang us.
// Threads: the loop's.
class SocketIo {
 public:
  SocketIo(int fd, SocketWait wait, Guard& guard);

  // Sends everything, in calls of at most chunk_bytes; 0: no such limit.
  void send_all(const std::byte* bytes, size_t length_bytes, size_t chunk_bytes = 0);
  void recv_all(std::byte* bytes, size_t length_bytes, size_t chunk_bytes = 0);
  // Sends all of `parts`, whose entries it modifies.
  void send_all(std::span<iovec> parts);
  void recv_all(std::span<iovec> parts);
  // Receives what is there, at least one byte; waits for it.
  size_t recv_some(std::byte* bytes, size_t room_bytes);

 private:
  // Bytes moved, or 0 if the call must be repeated. Throws if the connection is gone or the guard says so.
  size_t moved(const char* call, ssize_t result);
  template <typename Call>
  void move_all(std::span<iovec> parts, const char* name, Call call);

  const int fd_;
  const int flags_;
  Guard& guard_;
};

// Running totals of 8 bytes that the receiver sends back.
// Invariant: taken() never falls.
class SocketAcks {
 public:
  explicit SocketAcks(SocketIo& io) : io_(io) {}

  // Waits until at least `total` is acknowledged.
  void await(uint64_t total);

 private:
  static constexpr size_t kRoom = 64;
  SocketIo& io_;
  uint64_t taken_ = 0;
  std::byte buffer_[kRoom * sizeof(uint64_t)];
  size_t held_bytes_ = 0;  // of an incomplete total
};

void send_ack(SocketIo& io, uint64_t total);

}  // namespace crossrail::bench
