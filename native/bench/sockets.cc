#include "bench/sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bench/socket_io.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::bench {
namespace {

constexpr uint64_t kBatchesInFlight = 2;
constexpr size_t kMessagesBytes = 64 * 1024;  // per send, and per acknowledgement
constexpr uint64_t kMessagesInFlightBytes = 1 << 20;

// One entry of the table before the pages: the minimum that a protocol needs to say where a page goes.
struct PageTarget {
  uint64_t offset_bytes;
  uint64_t length_bytes;
};

// The position of each message of a stream, at both ends.
class Walk {
 public:
  Walk(std::span<std::byte> memory, uint64_t step_bytes) : memory_(memory), step_bytes_(step_bytes) {
    if (step_bytes > 0 && step_bytes <= memory.size()) return;
    throw UsageError("message_bytes is " + std::to_string(step_bytes) + " and must be 1 to " +
                     std::to_string(memory.size()));
  }
  std::byte* next() {
    std::byte* place = memory_.data() + offset_bytes_;
    offset_bytes_ += step_bytes_;
    if (offset_bytes_ + step_bytes_ > memory_.size()) offset_bytes_ = 0;
    return place;
  }

 private:
  std::span<std::byte> memory_;
  uint64_t step_bytes_;
  uint64_t offset_bytes_ = 0;
};

std::byte* page_of(std::span<std::byte> memory, uint64_t offset_bytes, uint64_t page_bytes) {
  if (offset_bytes <= memory.size() && page_bytes <= memory.size() - offset_bytes) return memory.data() + offset_bytes;
  throw UsageError("a page at " + std::to_string(offset_bytes) + " is outside of memory of " +
                   std::to_string(memory.size()) + " bytes");
}

// The buffers of both ends of socket_pages. One part more than pages: the table.
struct Batch {
  explicit Batch(uint64_t pages) : table(pages), parts(pages + 1) {}
  std::vector<PageTarget> table;
  std::vector<iovec> parts;
};

void send_batch(SocketIo& io, std::span<std::byte> memory, const SocketPages& loop, size_t first, size_t count,
                Batch& batch) {
  batch.parts[0] = {batch.table.data(), count * sizeof(PageTarget)};
  for (size_t i = 0; i < count; ++i) {
    const auto src = static_cast<uint64_t>(loop.src_pages[first + i]) * loop.page_bytes;
    const auto dst = static_cast<uint64_t>(loop.dst_pages[first + i]) * loop.page_bytes;
    batch.table[i] = {.offset_bytes = dst, .length_bytes = loop.page_bytes};
    batch.parts[i + 1] = {page_of(memory, src, loop.page_bytes), loop.page_bytes};
  }
  io.send_all(std::span(batch.parts).first(count + 1));
}

void recv_batch(SocketIo& io, std::span<std::byte> memory, size_t count, Batch& batch) {
  io.recv_all(reinterpret_cast<std::byte*>(batch.table.data()), count * sizeof(PageTarget));
  for (size_t i = 0; i < count; ++i) {
    const PageTarget& target = batch.table[i];
    batch.parts[i] = {page_of(memory, target.offset_bytes, target.length_bytes), target.length_bytes};
  }
  io.recv_all(std::span(batch.parts).first(count));
}

void send_messages(SocketIo& io, uint64_t message_bytes, uint64_t count) {
  const uint64_t per_call = std::max<uint64_t>(1, kMessagesBytes / message_bytes);
  const uint64_t window = std::max<uint64_t>(per_call, kMessagesInFlightBytes / message_bytes);
  std::vector<std::byte> source(per_call * message_bytes);
  std::vector<std::byte> out(source.size());
  SocketAcks acks(io);
  for (uint64_t sent = 0; sent < count;) {
    const uint64_t now = std::min(per_call, count - sent);
    if (sent + now > window) acks.await(sent + now - window);
    for (uint64_t i = 0; i < now; ++i) {
      std::memcpy(out.data() + i * message_bytes, source.data() + i * message_bytes, message_bytes);
    }
    io.send_all(out.data(), now * message_bytes);
    sent += now;
  }
  acks.await(count);
}

void recv_messages(SocketIo& io, uint64_t message_bytes, uint64_t count) {
  const uint64_t per_ack = std::max<uint64_t>(1, kMessagesBytes / message_bytes);
  std::vector<std::byte> in(kMessagesBytes + message_bytes);
  std::vector<std::byte> taken(per_ack * message_bytes);
  size_t held_bytes = 0;
  uint64_t acked = 0;
  for (uint64_t got = 0; got < count;) {
    held_bytes += io.recv_some(in.data() + held_bytes, in.size() - held_bytes);
    size_t used_bytes = 0;
    for (; held_bytes - used_bytes >= message_bytes; used_bytes += message_bytes, ++got) {
      std::memcpy(taken.data() + got % per_ack * message_bytes, in.data() + used_bytes, message_bytes);
    }
    held_bytes -= used_bytes;
    std::memmove(in.data(), in.data() + used_bytes, held_bytes);
    if (got - acked < per_ack && got < count) continue;
    send_ack(io, got);
    acked = got;
  }
}

void check_some(const char* what, uint64_t value) {
  if (value == 0) throw UsageError(std::string(what) + " is 0 and must be at least 1");
}

}  // namespace

void tune_socket(int fd) {
  const int on = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) {
    throw_errno("setsockopt", "cannot switch Nagle's algorithm off");
  }
  // Refused if the administrator allows only others: those are then this machine's limit.
  constexpr std::string_view kReno = "reno";
  (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kReno.data(), kReno.size());
}

int64_t socket_stream(int fd, std::span<std::byte> memory, bool sender, const SocketStream& loop, Guard& guard) {
  check_some("window", loop.window);
  Walk walk(memory, loop.message_bytes);
  SocketIo io(fd, loop.wait, guard);
  SocketAcks acks(io);
  const int64_t start_ns = now_ns();
  for (uint64_t done = 1; done <= loop.count; ++done) {
    if (sender) {
      if (done > loop.window) acks.await(done - loop.window);
      io.send_all(walk.next(), loop.message_bytes, loop.chunk_bytes);
    } else {
      io.recv_all(walk.next(), loop.message_bytes, loop.chunk_bytes);
      send_ack(io, done);
    }
  }
  if (sender) acks.await(loop.count);
  return now_ns() - start_ns;
}

int64_t socket_pages(int fd, std::span<std::byte> memory, bool sender, const SocketPages& loop, Guard& guard) {
  check_some("batch_pages", loop.batch_pages);
  check_some("page_bytes", loop.page_bytes);
  if (loop.src_pages.size() != loop.dst_pages.size()) throw UsageError("src_pages and dst_pages differ in length");
  SocketIo io(fd, loop.wait, guard);
  SocketAcks acks(io);
  Batch batch(loop.batch_pages);
  const size_t page_count = loop.dst_pages.size();
  const uint64_t window = kBatchesInFlight * loop.batch_pages;
  const int64_t start_ns = now_ns();
  for (size_t first = 0; first < page_count; first += loop.batch_pages) {
    const size_t count = std::min<size_t>(loop.batch_pages, page_count - first);
    if (sender) {
      if (first + count > window) acks.await(first + count - window);
      send_batch(io, memory, loop, first, count, batch);
    } else {
      recv_batch(io, memory, count, batch);
      send_ack(io, first + count);
    }
  }
  if (sender) acks.await(page_count);
  return now_ns() - start_ns;
}

int64_t socket_ping_pong(int fd, bool first, uint64_t message_bytes, uint64_t rounds, SocketWait wait, Guard& guard) {
  SocketIo io(fd, wait, guard);
  std::vector<std::byte> message(message_bytes);
  const int64_t start_ns = now_ns();
  for (uint64_t round = 0; round < rounds; ++round) {
    if (!first) io.recv_all(message.data(), message_bytes);
    io.send_all(message.data(), message_bytes);
    if (first) io.recv_all(message.data(), message_bytes);
  }
  return now_ns() - start_ns;
}

int64_t socket_messages(int fd, bool sender, uint64_t message_bytes, uint64_t count, SocketWait wait, Guard& guard) {
  check_some("message_bytes", message_bytes);
  SocketIo io(fd, wait, guard);
  const int64_t start_ns = now_ns();
  if (sender) {
    send_messages(io, message_bytes, count);
  } else {
    recv_messages(io, message_bytes, count);
  }
  return now_ns() - start_ns;
}

}  // namespace crossrail::bench
