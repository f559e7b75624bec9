// How the paths of a NIC share its single transmit queue, on providers where they do (efa).
#pragma once

#include <algorithm>
#include <cstdint>

namespace crossrail::ofi {

// Works for a host that has vanished stay in the queue until the provider or the layer gives them up. So that others
// can continue meanwhile, three quarters of the queue are first come, first served: a path may have no more works, and
// no more fragments, than an eighth of what is left of them, or a larger part if the queue is so short that a single
// path would not get its works. The last quarter is reserved for paths that have just a few; short fragments (pings,
// and answers to them) have room when others have none. With 4096 entries some 85 peers can stand still.
class TransmitShares {
 public:
  TransmitShares() = default;
  // entries: of the queue. path_works_max: NicLimits::path_works_max.
  TransmitShares(uint32_t entries, uint32_t path_works_max)
      : entries_(entries),
        reserve_(entries / 4),
        divisor_(std::clamp<uint32_t>((entries - reserve_) / std::max(path_works_max, 1u), 2, 8)),
        few_(std::clamp<uint32_t>(entries / 1024, 1, 4)) {}

  // How many more works or fragments a path may post that has `outstanding` of that kind in flight, of at most
  // path_max. used: occupied entries of the queue.
  uint32_t room(uint32_t used, uint32_t outstanding, uint32_t path_max, uint32_t kept) const {
    const uint32_t left = entries_ - std::min(used, entries_);
    const uint32_t free = left - std::min(left, reserve_);
    const uint32_t share = std::min(free / divisor_, path_max);
    if (outstanding < share) return share - outstanding;
    return outstanding < kept ? std::min(kept - outstanding, left) : 0;
  }
  // What a path may have in any case, while there is room at all.
  uint32_t works_kept() const { return few_; }
  uint32_t fragments_kept() const { return few_; }
  uint32_t short_fragments_kept() const { return 2 * few_; }

 private:
  uint32_t entries_ = 0;
  uint32_t reserve_ = 0;
  uint32_t divisor_ = 2;
  uint32_t few_ = 1;
};

}  // namespace crossrail::ofi
