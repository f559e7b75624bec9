// What the NICs of a transport know about one piece of memory, and how regions share it.
//
// Only registrations for our own use (Access::kLocal) are shared: sources, and what a region keeps for itself while its
// peers are locked out. They admit no peer, so none need be revoked while others continue. Memory that peers may access
// is registered separately for each region: its key has to die with the region, and a key dies with its registration.
//
// Nothing is cached. A region joins another's registrations only while that one is open and covers it: until it is
// closed, the caller promises that its memory stays mapped, so the NICs know the right pages. Caches that outlive their
// regions have to watch munmap, and hand out keys for memory that was remapped whenever they miss one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "transport/rdma/nic.h"

namespace crossrail::rdma {

class RdmaRegion;

// False: the device of its rail is gone.
inline bool is_known_at(const std::shared_ptr<Registration>& registration) { return registration->key != kNoKey; }

// One piece of memory, registered at every NIC.
struct Registrations {
  void revoke() const;
  bool is_quiet() const;
  // Null: no NIC that knows it is left.
  const Registration* any() const;

  std::vector<std::shared_ptr<Registration>> by_rail;  // one object for all rails that share registrations
  uint32_t users = 0;  // regions that share it; guarded by the lock of SharedRegistrations
};

// Threads: any. Its lock is never held while a NIC registers or deregisters memory, which takes milliseconds per
// gigabyte. So two threads that register the same memory at once may end up with a registration each.
// Invariant: each region here is open, and its memory lies within what its registrations cover.
class SharedRegistrations {
 public:
  // Gives it the registrations of an open region that covers it. False: there is none, it needs its own. GPU memory is
  // joined only for the same range: the driver drops registrations when one of the allocations below them is freed, and
  // a smaller region must not lose its own that way.
  bool join(RdmaRegion& region);
  // It has registrations of its own: from now on others that can use them may join it.
  void add(const RdmaRegion& region);
  // It no longer uses its registrations, and nobody may join it. True: no other region uses them, and the caller is to
  // revoke them.
  bool leave(const RdmaRegion& region);

 private:
  // Bit length of its length, address, id. A region that covers a range has a length of at least as many bits, and
  // begins within the next power of two before the range's end: few have to be looked at, however many there are.
  using Place = std::tuple<uint32_t, uint64_t, uint64_t>;
  static Place place_of(const RdmaRegion& region);
  const RdmaRegion* find(const RdmaRegion& wanted) const;

  std::mutex mutex_;
  std::map<Place, const RdmaRegion*> open_;
};

}  // namespace crossrail::rdma
