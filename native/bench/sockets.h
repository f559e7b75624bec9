// What bare TCP sockets can do on this machine: the limits of everything that goes over sockets.
//
// One connection and one thread at each end, no engine; both ends run the same loop with the same arguments, one as
// sender (or first), one as receiver. Each loop leaves the connection empty, so that the next one can use it. Times are
// nanoseconds, on the sender's side until the receiver has everything and has said so. Threads: the caller's; pin both
// as the measured loops are pinned. Bytes from the other end are not trusted beyond what keeps us inside `memory`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bench/guard.h"

namespace crossrail::bench {

enum class SocketWait : uint8_t {
  kSpin,  // recv and send with MSG_DONTWAIT, again and again: one core at each end
  kBlock  // they sleep in the kernel
};

// What makes a bare socket fast; call it before bind or connect, at both ends. No Nagle, and Reno in place of the
// system's congestion control where that is allowed: BBR paces, which costs a tenth of loopback's throughput and more.
void tune_socket(int fd);

// `count` messages of `message_bytes`, each at the next place of the memory, walking through it; each is acknowledged
// with 8 bytes; at most `window` are not acknowledged. chunk_bytes: of a system call at this end, at most; 0: the rest
// of the message. What is fastest is the caller's to find out: it depends on the caches.
struct SocketStream {
  uint64_t message_bytes = 0;
  uint64_t chunk_bytes = 0;
  uint64_t count = 0;
  uint32_t window = 1;
  SocketWait wait = SocketWait::kSpin;
};
int64_t socket_stream(int fd, std::span<std::byte> memory, bool sender, const SocketStream& loop, Guard& guard);

// Page src_pages[i] of the sender's memory to page dst_pages[i] of the receiver's, for each i: in batches of a table of
// targets and the pages behind it, gathered and scattered by the kernel. Each batch is acknowledged, two may be under
// way. The receiver uses dst_pages only for its length.
struct SocketPages {
  std::span<const int64_t> src_pages;
  std::span<const int64_t> dst_pages;
  uint64_t page_bytes = 0;
  uint64_t batch_pages = 0;
  SocketWait wait = SocketWait::kSpin;
};
int64_t socket_pages(int fd, std::span<std::byte> memory, bool sender, const SocketPages& loop, Guard& guard);

// `rounds` round trips of `message_bytes` there and back.
int64_t socket_ping_pong(int fd, bool first, uint64_t message_bytes, uint64_t rounds, SocketWait wait, Guard& guard);

// `count` messages of `message_bytes`, copied together into one send of up to 64 KiB and taken apart again by a copy of
// each; 8 bytes come back for every 64 KiB of them, and at most 1 MiB is not acknowledged.
int64_t socket_messages(int fd, bool sender, uint64_t message_bytes, uint64_t count, SocketWait wait, Guard& guard);

}  // namespace crossrail::bench
