#include "bench/loops.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

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

int64_t run_ping_pong(Engine& engine, const PingPong& loop, Guard& guard) {
  // relaxed: one thread of ours writes the word, and the count orders the peer's word before our read of it.
  auto* out = reinterpret_cast<std::atomic<uint64_t>*>(loop.src->base());
  auto* landed = reinterpret_cast<std::atomic<uint64_t>*>(loop.landing->base());
  const WriteRequest request{.src = loop.src, .dst = loop.dst, .length_bytes = kWordBytes, .imm = loop.imm_out};
  TransferRef sent;
  const int64_t start_ns = now_ns();
  for (uint64_t round = 1; round <= loop.rounds; ++round) {
    if (!loop.first) await_count(engine, *loop.in, 1, guard);
    if (loop.verify && !loop.first && landed->load(std::memory_order_relaxed) != round) {
      throw TransportError("bench", 0,
                           "ping-pong counted round " + std::to_string(round) + " before its data was there");
    }
    if (loop.verify) settle(engine, std::exchange(sent, nullptr), guard);
    if (loop.verify) out->store(round, std::memory_order_relaxed);
    sent = engine.submit_write(request);
    if (loop.first) await_count(engine, *loop.in, 1, guard);
    if (loop.verify && loop.first && landed->load(std::memory_order_relaxed) != round) {
      throw TransportError("bench", 0,
                           "ping-pong counted round " + std::to_string(round) + " before its data was there");
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
