// One engine with its memory, for measuring: handles are indices, descriptors are bytes.
//
// The loops run on their own engines, separate from those of the Python API, so that the results do not depend on how
// the bindings wrap an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bench/guard.h"
#include "bench/loops.h"
#include "engine/engine.h"

namespace crossrail::bench {

// Threads: one at a time.
// Invariant: an index given out stays valid until close().
class Rig {
 public:
  static constexpr uint32_t kPoolMessages = 1024;
  static constexpr uint32_t kPoolMessageBytes = 4096;

  explicit Rig(const EngineOptions& options);
  ~Rig();
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  // Closes regions and engine. Idempotent.
  void close();

  Engine& engine();
  Bytes address() { return engine().address().encode(); }

  // Memory that peers map, and private memory of this process; both are faulted in. Returns its index.
  size_t alloc(uint64_t length_bytes);
  size_t map_private(uint64_t length_bytes);
  // A region of another rig. Returns its index, numbered separately.
  size_t remote(std::span<const uint8_t> descriptor);
  // Peers for scatter. Returns its index, numbered separately.
  size_t group(const std::vector<Bytes>& addresses);

  Region& region(size_t index) const;
  RemoteRegion& remote_region(size_t index) const;
  PeerGroup& peer_group(size_t index) const;
  std::span<std::byte> memory(size_t index) const;
  ImmCounter* counter(uint32_t imm);
  PeerRef peer(std::span<const uint8_t> address);
  // Opened at first use: room for kPoolMessages of kPoolMessageBytes.
  ReceivePool& pool();

  // Drives a manual engine for a while, so that a peer's handshake or close gets its answer.
  void drive(double seconds, Guard& guard);

 private:
  // Anonymous memory, unmapped once the rig is gone and nothing can touch it any more.
  struct Mapping {
    void* base;
    size_t length_bytes;
  };
  void unmap_all();

  EngineRef engine_;
  std::vector<RegionRef> regions_;
  std::vector<RemoteRegionRef> remotes_;
  std::vector<PeerGroupRef> groups_;
  std::vector<Ref<ImmCounter>> counters_;  // few: searched linearly
  std::vector<Mapping> mappings_;
  Ref<ReceivePool> pool_;
};

}  // namespace crossrail::bench
