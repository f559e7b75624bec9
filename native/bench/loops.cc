#include "bench/loops.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "bench/window.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::bench {
namespace {

constexpr uint64_t kWordBytes = sizeof(uint64_t);

void finish(Engine& engine, Window& window, Ack ack, Guard& guard) {
  window.settle_all();
  if (ack.counter != nullptr) await_count(engine, *ack.counter, 1, guard);
}

void check_span(const char* what, uint64_t piece_bytes, uint64_t span_bytes) {
  if (piece_bytes == 0 || span_bytes < piece_bytes) {
    throw UsageError("span_bytes is " + std::to_string(span_bytes) + " and must hold at least one " + what + " of " +
                     std::to_string(piece_bytes) + " bytes, which must not be empty");
  }
}

// Source slice, target slice and length of each target of one scatter.
struct Slices {
  Slices(size_t count, uint64_t slice_bytes) : src(count), dst(count), lengths(count, slice_bytes) {}
  std::vector<uint64_t> src, dst, lengths;
};

// The first and the last word of a ping-pong's bytes; the same word if there are 8 bytes.
class EndWords {
 public:
  EndWords(const Region& region, uint64_t length_bytes)
      : first_(word_at(region, 0)), last_(word_at(region, length_bytes - kWordBytes)) {}

  // relaxed: only one of our threads writes the words, and the count orders the peer's writes before our read.
  void store(uint64_t value) const {
    first_->store(value, std::memory_order_relaxed);
    last_->store(value, std::memory_order_relaxed);
  }
  void check(uint64_t expected) const {
    if (first_->load(std::memory_order_relaxed) == expected && last_->load(std::memory_order_relaxed) == expected)
      return;
    throw TransportError("bench", 0,
                         "ping-pong counted round " + std::to_string(expected) + " before its data was there");
  }

 private:
  static std::atomic<uint64_t>* word_at(const Region& region, uint64_t offset) {
    return reinterpret_cast<std::atomic<uint64_t>*>(region.base() + offset);
  }

  std::atomic<uint64_t>* first_;
  std::atomic<uint64_t>* last_;
};

void check_ping_pong(const PingPong& loop) {
  const uint64_t room_bytes = std::min(loop.src->length_bytes(), loop.landing->length_bytes());
  if (loop.length_bytes < kWordBytes || loop.length_bytes % kWordBytes != 0 || loop.length_bytes > room_bytes) {
    throw UsageError("nbytes is " + std::to_string(loop.length_bytes) + " and must be a multiple of 8, 8 to " +
                     std::to_string(room_bytes));
  }
  if (!loop.round_ns.empty() && loop.round_ns.size() != loop.rounds) {
    throw UsageError("round_ns has " + std::to_string(loop.round_ns.size()) + " places for " +
                     std::to_string(loop.rounds) + " rounds");
  }
}

}  // namespace

int64_t run_writes(Engine& engine, const WriteLoop& loop, Ack ack, Guard& guard) {
  check_span("write", loop.length_bytes, loop.span_bytes);
  Window window(engine, loop.window, guard);
  WriteRequest request{.src = loop.src, .dst = loop.dst, .length_bytes = loop.length_bytes, .imm = loop.imm};
  const int64_t start_ns = now_ns();
  for (uint64_t i = 0; i < loop.op_count; ++i) {
    window.make_room();
    window.add(engine.submit_write(request));
    request.src_offset += loop.length_bytes;
    if (request.src_offset + loop.length_bytes > loop.span_bytes) request.src_offset = 0;
    request.dst_offset = request.src_offset;
  }
  finish(engine, window, ack, guard);
  return now_ns() - start_ns;
}

int64_t run_paged_writes(Engine& engine, const PagedLoop& loop, Ack ack, Guard& guard) {
  if (loop.batch_pages == 0 || loop.src_pages.size() != loop.dst_pages.size()) {
    throw UsageError("batch_pages must be at least 1, and src_pages and dst_pages equally long");
  }
  Window window(engine, loop.window, guard);
  PagedWriteRequest request;
  request.src = loop.src;
  request.dst = loop.dst;
  request.src_stride_bytes = request.dst_stride_bytes = request.page_bytes = loop.page_bytes;
  request.imm = loop.imm;
  const int64_t start_ns = now_ns();
  for (uint64_t round = 0; round < loop.rounds; ++round) {
    for (size_t first = 0; first < loop.src_pages.size(); first += loop.batch_pages) {
      const uint64_t count = std::min<uint64_t>(loop.batch_pages, loop.src_pages.size() - first);
      request.src_pages = {.data = loop.src_pages.data() + first, .count = count, .type = IndexType::kInt64};
      request.dst_pages = {.data = loop.dst_pages.data() + first, .count = count, .type = IndexType::kInt64};
      window.make_room();
      window.add(engine.submit_paged_writes(request));
    }
  }
  finish(engine, window, ack, guard);
  return now_ns() - start_ns;
}

int64_t run_scatters(Engine& engine, const ScatterLoop& loop, Ack ack, Guard& guard) {
  const size_t peer_count = loop.dsts.size();
  check_span("scatter", loop.slice_bytes * peer_count, loop.span_bytes);
  Window window(engine, loop.window, guard);
  Slices slices(peer_count, loop.slice_bytes);
  const uint64_t src_step = loop.slice_bytes * peer_count;
  uint64_t src_base = 0;
  uint64_t dst_base = 0;
  const int64_t start_ns = now_ns();
  for (uint64_t i = 0; i < loop.op_count; ++i) {
    for (size_t k = 0; k < peer_count; ++k) {
      slices.src[k] = src_base + k * loop.slice_bytes;
      slices.dst[k] = dst_base;
    }
    window.make_room();
    window.add(engine.submit_scatter({.src = loop.src,
                                      .dsts = loop.dsts,
                                      .src_offsets = slices.src,
                                      .dst_offsets = slices.dst,
                                      .lengths = slices.lengths,
                                      .group = loop.group,
                                      .imm = loop.imm}));
    src_base += src_step;
    if (src_base + src_step > loop.span_bytes) src_base = 0;
    dst_base += loop.slice_bytes;
    if (dst_base + loop.slice_bytes > loop.span_bytes) dst_base = 0;
  }
  finish(engine, window, ack, guard);
  return now_ns() - start_ns;
}

int64_t run_reads(Engine& engine, const ReadLoop& loop, Guard& guard) {
  check_span("read", loop.length_bytes, loop.span_bytes);
  Window window(engine, loop.window, guard);
  ReadRequest request{.dst = loop.dst, .src = loop.src, .length_bytes = loop.length_bytes};
  const int64_t start_ns = now_ns();
  for (uint64_t i = 0; i < loop.op_count; ++i) {
    window.make_room();
    window.add(engine.submit_read(request));
    request.src_offset += loop.length_bytes;
    if (request.src_offset + loop.length_bytes > loop.span_bytes) request.src_offset = 0;
    request.dst_offset = request.src_offset;
  }
  window.settle_all();
  return now_ns() - start_ns;
}

int64_t run_ping_pong(Engine& engine, const PingPong& loop, Guard& guard) {
  check_ping_pong(loop);
  const EndWords out(*loop.src, loop.length_bytes);
  const EndWords landed(*loop.landing, loop.length_bytes);
  const WriteRequest request{.src = loop.src, .dst = loop.dst, .length_bytes = loop.length_bytes, .imm = loop.imm_out};
  TransferRef sent;
  const int64_t start_ns = now_ns();
  int64_t round_start_ns = start_ns;
  for (uint64_t round = 1; round <= loop.rounds; ++round) {
    if (!loop.first) await_count(engine, *loop.in, 1, guard);
    if (loop.verify && !loop.first) landed.check(round);
    if (loop.verify) settle(engine, std::exchange(sent, nullptr), guard);
    if (loop.verify) out.store(round);
    sent = engine.submit_write(request);
    if (loop.first) await_count(engine, *loop.in, 1, guard);
    if (loop.verify && loop.first) landed.check(round);
    if (!loop.round_ns.empty()) {
      const int64_t end_ns = now_ns();
      loop.round_ns[round - 1] = end_ns - std::exchange(round_start_ns, end_ns);
    }
  }
  settle(engine, sent, guard);
  return now_ns() - start_ns;
}

int64_t run_receivers(std::span<const Receiver> receivers, uint64_t count, Region& reply_src, RemoteRegion& reply_dst,
                      uint32_t reply_imm, Guard& guard) {
  if (receivers.empty()) throw UsageError("receivers is empty and must hold at least one");
  const int64_t start_ns = now_ns();
  std::vector<Receiver> waiting(receivers.begin(), receivers.end());
  if (waiting.size() == 1) {
    await_count(*waiting[0].engine, *waiting[0].counter, count, guard);
    waiting.clear();
  }
  while (!waiting.empty()) {
    std::erase_if(waiting, [count](const Receiver& receiver) {
      receiver.engine->progress();
      return receiver.counter->try_consume(count);
    });
    guard.tick();
  }
  settle(*receivers[0].engine,
         receivers[0].engine->submit_write({.src = &reply_src, .dst = &reply_dst, .imm = reply_imm}), guard);
  return now_ns() - start_ns;
}

}  // namespace crossrail::bench
