// The cost of the host's part of a round: rank 0 of 64 in nodes of eight posts the decode shape to its 56 far ranks,
// over a transport that moves nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/guard.h"
#include "engine/engine.h"
#include "moe/proxy.h"

namespace crossrail::bench {

// Threads: one at a time.
class MoePosting {
 public:
  MoePosting();
  ~MoePosting();
  MoePosting(const MoePosting&) = delete;
  MoePosting& operator=(const MoePosting&) = delete;

  // Each returns one time per round, in ns. Posting only: until the writes to all 56 are handed to the transport.
  std::vector<int64_t> routes(uint32_t rounds, Guard& guard);
  std::vector<int64_t> rows(uint32_t rounds, Guard& guard);
  std::vector<int64_t> results(uint32_t rounds, Guard& guard);

  // From when routes are there until the first write of them is handed to the transport. Posted by the caller, by a
  // ProxyThread that it tells, or by the thread of a StreamProxy that sees the GPU's word, which the caller writes.
  // cpu: of that thread.
  std::vector<int64_t> first_write_by_caller(uint32_t rounds, Guard& guard);
  std::vector<int64_t> first_write_by_thread(int32_t cpu, uint32_t rounds, Guard& guard);
  std::vector<int64_t> first_write_of_stream(int32_t cpu, uint32_t rounds, Guard& guard);

 private:
  void meet();
  template <typename Post>
  std::vector<int64_t> until_all(uint32_t rounds, Guard& guard, Post post);
  void drain(Guard& guard);

  const moe::Layout layout_;
  const moe::FarMemory memory_;
  EngineRef engine_;
  EngineRef far_;
  moe::FarRegions<RegionRef> regions_;
  moe::FarRegions<RegionRef> there_;
  std::unique_ptr<moe::Proxy> proxy_;
  uint32_t round_ = 0;
};

}  // namespace crossrail::bench
