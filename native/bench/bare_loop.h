// What a library of RDMA NICs can do on this machine without the engine: the limits of an engine that uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/guard.h"

namespace crossrail::bench {

// One endpoint, one process at each end, no engine. A write is complete once it is placed, as the engine has it. Each
// call leaves nothing under way, so that the next one can follow. Threads: the caller's.
class BareLoop {
 public:
  struct Target {
    uint64_t base = 0;
    uint64_t key = 0;
  };
  static constexpr uint32_t kWordBytes = 8;  // of the ping-pong
  virtual ~BareLoop() = default;

  // For the peer's meet().
  virtual const std::vector<uint8_t>& name() const = 0;
  // Memory that stays where it is until this is destroyed.
  virtual Target add_memory(std::span<std::byte> memory) = 0;
  // Both ends do, before either writes.
  virtual void meet(const std::vector<uint8_t>& peer_name) = 0;

  // `count` writes of `length_bytes` with an immediate each, at the next place each, `window` of them not complete.
  // Nanoseconds, here and below. The peer receives `count`.
  virtual int64_t writes(std::span<std::byte> source, Target target, uint64_t length_bytes, uint64_t count,
                         uint32_t window, Guard& guard) = 0;
  // Page src_pages[i] to page dst_pages[i]. imm_each: an immediate with each page, of which the peer receives as many;
  // else with the last alone, which says that all are there only where the NIC keeps their order.
  virtual int64_t pages(std::span<std::byte> source, Target target, std::span<const int64_t> src_pages,
                        std::span<const int64_t> dst_pages, uint64_t page_bytes, uint32_t window, bool imm_each,
                        Guard& guard) = 0;
  // `rounds` round trips of an 8-byte write with an immediate, both ends looking for it all the time. Both ends run it,
  // one as the first.
  virtual int64_t ping_pong(std::span<std::byte> source, Target target, uint64_t rounds, bool first, Guard& guard) = 0;
  // The target: until `count` immediates came.
  virtual void receive(uint64_t count, Guard& guard) = 0;
  // Lets the library do what is due: for an end that has nothing to do while the peer ends its loop.
  virtual void progress() = 0;
};

// At an address (tcp) or device of a provider of libfabric. Throws TransportError.
std::unique_ptr<BareLoop> open_fabric_loop(const std::string& provider, const std::string& rail);
// On the port that an engine with one rail takes. Throws TransportError, also in a build without verbs.
std::unique_ptr<BareLoop> open_verbs_loop();

}  // namespace crossrail::bench
