// What bare TCP sockets can do on this machine: the limits of everything that goes over sockets.
//
// One connection and one thread at each end, no engine; both ends run the same loop with the same arguments, one as
// sender (or first), one as receiver. Each loop leaves the connection empty, so that the next one can use it. Times are
// nanoseconds, measured by the sender until the receiver has everything and has said so. Threads: the caller's; pin
// both as the measured loops are pinned. Bytes from the other end are trusted only as far as they cannot take us out of
// `memory`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bench/guard.h"

namespace crossrail::bench {

enum class SocketWait : uint8_t {
  kSpin,  // recv and send with MSG_DONTWAIT, repeatedly: one core at each end
  kBlock  // they sleep in the kernel
};

// Makes a bare socket fast; call it before bind or connect, at both ends. No Nagle, and Reno instead of the system's
// congestion control if that is allowed: BBR paces, which costs a tenth of loopback's throughput and more.
void tune_socket(int fd);

// `count` messages of `message_bytes`, each at the next place in the memory; each is acknowledged with 8 bytes, and at
// most `window` are unacknowledged. chunk_bytes: the most per system call at this end; 0: the rest of the message. The
// caller has to find out what is fastest: it depends on the caches.
struct SocketStream {
  uint64_t message_bytes = 0;
  uint64_t chunk_bytes = 0;
  uint64_t count = 0;
  uint32_t window = 1;
  SocketWait wait = SocketWait::kSpin;
};
int64_t socket_stream(int fd, std::span<std::byte> memory, bool sender, const SocketStream& loop, Guard& guard);

// Page src_pages[i] of the sender's memory to page dst_pages[i] of the receiver's, for each i: in batches that consist
// of a table of targets and the pages after it, gathered and scattered by the kernel. Each batch is acknowledged; two
// may be in flight. The receiver uses only the length of dst_pages.
struct SocketPages {
  std::span<const int64_t> src_pages;
  std::span<const int64_t> dst_pages;
  uint64_t page_bytes = 0;
  uint64_t batch_pages = 0;
  SocketWait wait = SocketWait::kSpin;
};
int64_t socket_pages(int fd, std::span<std::byte> memory, bool sender, const SocketPages& loop, Guard& guard);

// `rounds` round trips of `message_bytes`.
int64_t socket_ping_pong(int fd, bool first, uint64_t message_bytes, uint64_t rounds, SocketWait wait, Guard& guard);

// `count` messages of `message_bytes`, copied together into sends of up to 64 KiB and copied apart again; 8 bytes come
// back for every 64 KiB of them, and at most 1 MiB is unacknowledged.
int64_t socket_messages(int fd, bool sender, uint64_t message_bytes, uint64_t count, SocketWait wait, Guard& guard);

}  // namespace crossrail::bench
