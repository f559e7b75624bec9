// The regions of an engine that peers may name.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "engine/region.h"
#include "transport/types.h"

namespace crossrail {

// By the id that peers know. Threads: any.
class NamedRegions {
 public:
  void add(uint64_t id, Region* region);
  // Not to be named any more: it is closed, or its peers are locked out.
  void remove(uint64_t id, bool is_revoked);
  // None if no region has this id now.
  RegionUse use(uint64_t id);
  // Why not: kRegionRevoked or kRegionClosed, for an id that a region once had.
  Status status_of_gone(uint64_t id);

 private:
  static constexpr size_t kRevokedKept = 1024;  // late peers learn that these were revoked; older ones are just gone

  std::mutex mutex_;  // guards everything below
  std::unordered_map<uint64_t, Region*> regions_;
  std::deque<uint64_t> revoked_;  // the last ones, oldest first
};

}  // namespace crossrail
