// The measured loops: the engine driven through its public interface, with no Python inside the clock.
//
// Each loop runs on the caller's thread. With Polling::kManual that thread is also the worker, which is how small
// operations are measured: on two cores, a spinning worker next to a spinning caller in each process would measure the
// scheduler. All return nanoseconds and throw if a transfer fails, the time is up or the user interrupts.
#pragma once

#include <cstdint>
#include <span>

#include "bench/guard.h"
#include "engine/engine.h"

namespace crossrail::bench {

// What stops a loop's clock: this counter, by which the receiver says that it has counted everything. Without a
// counter, because the transport moves nothing, the clock stops with the last completion.
struct Ack {
  ImmCounter* counter = nullptr;
};

// `op_count` writes of `length_bytes`, `window` of them in flight, each at the next place in a span of `span_bytes`, so
// that a span far larger than the caches is used completely.
struct WriteLoop {
  Region* src = nullptr;
  RemoteRegion* dst = nullptr;
  uint64_t length_bytes = 0;
  uint64_t span_bytes = 0;
  uint64_t op_count = 0;
  uint32_t window = 1;
  uint32_t imm = kNoImm;
};
int64_t run_writes(Engine& engine, const WriteLoop& loop, Ack ack, Guard& guard);

// `op_count` reads of `length_bytes`, `window` of them in flight, through a span likewise. The peer does nothing: the
// clock stops when the last of them has completed.
struct ReadLoop {
  Region* dst = nullptr;
  RemoteRegion* src = nullptr;
  uint64_t length_bytes = 0;
  uint64_t span_bytes = 0;
  uint64_t op_count = 0;
  uint32_t window = 1;
};
int64_t run_reads(Engine& engine, const ReadLoop& loop, Guard& guard);

// All pages given, in calls of `batch_pages`, `window` calls in flight; everything `rounds` times.
struct PagedLoop {
  Region* src = nullptr;
  RemoteRegion* dst = nullptr;
  std::span<const int64_t> src_pages;
  std::span<const int64_t> dst_pages;
  uint64_t page_bytes = 0;
  uint64_t batch_pages = 0;
  uint64_t rounds = 1;
  uint32_t window = 1;
  uint32_t imm = kNoImm;
};
int64_t run_paged_writes(Engine& engine, const PagedLoop& loop, Ack ack, Guard& guard);

// `op_count` scatters of one slice of `slice_bytes` to each of `dsts`, `window` in flight. Call i sends to peer k the
// slice i * dsts.size() + k of the source, to slice i of the target, both modulo what fits in `span_bytes`.
struct ScatterLoop {
  Region* src = nullptr;
  std::span<RemoteRegion* const> dsts;
  PeerGroup* group = nullptr;
  uint64_t slice_bytes = 0;
  uint64_t span_bytes = 0;
  uint64_t op_count = 0;
  uint32_t window = 1;
  uint32_t imm = kNoImm;
};
int64_t run_scatters(Engine& engine, const ScatterLoop& loop, Ack ack, Guard& guard);

// `rounds` round trips of a write of `length_bytes`, a multiple of 8, with an immediate. With `verify`, its first and
// last words are a running number, which the receiving side checks once the write is counted; that pass is not timed.
struct PingPong {
  Region* src = nullptr;
  RemoteRegion* dst = nullptr;
  Region* landing = nullptr;  // where the other side writes to
  uint32_t imm_out = kNoImm;
  ImmCounter* in = nullptr;
  uint64_t rounds = 0;
  bool first = false;
  bool verify = false;
  uint64_t length_bytes = 8;
  std::span<int64_t> round_ns = {};  // empty, or one for each round: its duration, including two readings of the clock
};
int64_t run_ping_pong(Engine& engine, const PingPong& loop, Guard& guard);

// One engine and the counter that the other process counts up.
struct Receiver {
  Engine* engine = nullptr;
  ImmCounter* counter = nullptr;
};
// Waits until each receiver has counted `count`, then writes an empty write with `reply_imm` from the first one. With
// several receivers, all must be of Polling::kManual, since this thread drives them in turn.
int64_t run_receivers(std::span<const Receiver> receivers, uint64_t count, Region& reply_src, RemoteRegion& reply_dst,
                      uint32_t reply_imm, Guard& guard);

}  // namespace crossrail::bench
