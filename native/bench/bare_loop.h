// What a library for RDMA NICs can do on this machine without the engine: the limits for engines that use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/guard.h"

namespace crossrail::bench {

// One endpoint, one process at each end, no engine. A write is complete once it is placed, as for the engine. No call
// leaves anything in flight, so that the next one can follow. Threads: the caller's.
class BareLoop {
 public:
  struct Target {
    uint64_t base = 0;
    uint64_t key = 0;
  };
  static constexpr uint32_t kWordBytes = 8;  // for the ping-pong
  virtual ~BareLoop() = default;

  // To be passed to the peer's meet().
  virtual const std::vector<uint8_t>& name() const = 0;
  // The memory must stay where it is until this is destroyed.
  virtual Target add_memory(std::span<std::byte> memory) = 0;
  // Both ends call it before either writes.
  virtual void meet(const std::vector<uint8_t>& peer_name) = 0;

  // `count` writes of `length_bytes` with an immediate each, each at the next place, at most `window` of them
  // incomplete. Returns nanoseconds, here and below. The peer receives `count`.
  virtual int64_t writes(std::span<std::byte> source, Target target, uint64_t length_bytes, uint64_t count,
                         uint32_t window, Guard& guard) = 0;
  // Page src_pages[i] to page dst_pages[i]. imm_each: an immediate with each page, and the peer receives as many; else
  // only with the last, which proves that all have arrived only if the NIC keeps their order.
  virtual int64_t pages(std::span<std::byte> source, Target target, std::span<const int64_t> src_pages,
                        std::span<const int64_t> dst_pages, uint64_t page_bytes, uint32_t window, bool imm_each,
                        Guard& guard) = 0;
  // `rounds` round trips of an 8-byte write with an immediate, with both ends polling. Both ends run it, one of them as
  // the first.
  virtual int64_t ping_pong(std::span<std::byte> source, Target target, uint64_t rounds, bool first, Guard& guard) = 0;
  // At the target: until `count` immediates have arrived.
  virtual void receive(uint64_t count, Guard& guard) = 0;
  // Lets the library do its work: for an end that is idle while the peer finishes its loop.
  virtual void progress() = 0;
};

// At an address (tcp) or device of a libfabric provider. Throws TransportError.
std::unique_ptr<BareLoop> open_fabric_loop(const std::string& provider, const std::string& rail);
// On the port that an engine with one rail uses. Throws TransportError, also in a build without verbs.
std::unique_ptr<BareLoop> open_verbs_loop();

}  // namespace crossrail::bench
