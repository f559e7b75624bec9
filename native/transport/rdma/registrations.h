// What the NICs of a transport know of one piece of memory, and how regions share it.
//
// Shared are registrations for our own use alone (Access::kLocal): sources, and what a region keeps for itself while
// its peers are locked out. They admit no peer, so nobody has to lose one while others go on. What peers may reach is
// registered for each region by itself: its key has to die with it, and a key dies with its registration.
//
// Nothing is kept for later. A region joins another's registrations only while that one is open and covers it: until it
// is closed the caller promises that its memory stays what it is, so the NICs know the right pages. Caches that outlive
// their regions have to watch munmap, and hand out keys of memory that was mapped anew wherever they miss one.
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

// False: its rail's device is gone.
inline bool is_known_at(const std::shared_ptr<Registration>& registration) { return registration->key != kNoKey; }

// One piece of memory, at every NIC.
struct Registrations {
  void revoke() const;
  bool is_quiet() const;
  // Null: there is no NIC left that knows it.
  const Registration* any() const;

  std::vector<std::shared_ptr<Registration>> by_rail;  // one for all rails that share what they know
  uint32_t users = 0;                                  // regions that share it, under the lock of SharedRegistrations
};

// Threads: any. Never held while a NIC registers or forgets memory: that takes milliseconds for each gigabyte. So two
// threads that register the same memory at once may each have registrations of their own.
// Invariant: each region here is open, and its memory lies within what its registrations cover.
class SharedRegistrations {
 public:
  // Gives it the registrations of an open region that covers it. False: there is none, it needs its own.
  // Memory of GPUs is joined for the same range only: the driver takes registrations away when one of the allocations
  // below them is freed, and a smaller region must not lose its own by that.
  bool join(RdmaRegion& region);
  // It has registrations of its own: others may join it from now on, if they could use these.
  void add(const RdmaRegion& region);
  // It uses its registrations no more, and nobody joins it. True: no other region uses them, the caller is to revoke
  // them.
  bool leave(const RdmaRegion& region);

 private:
  // Bits of its length, address, id. What covers a range has a length of as many bits or more, and begins less than the
  // next power of two before the range's end: few are looked at, however many there are.
  using Place = std::tuple<uint32_t, uint64_t, uint64_t>;
  static Place place_of(const RdmaRegion& region);
  const RdmaRegion* find(const RdmaRegion& wanted) const;

  std::mutex mutex_;
  std::map<Place, const RdmaRegion*> open_;
};

}  // namespace crossrail::rdma
