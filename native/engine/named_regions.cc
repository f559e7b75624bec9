#include "engine/named_regions.h"

#include <algorithm>
#include <utility>

namespace crossrail {

void NamedRegions::add(uint64_t id, Region* region) {
  std::lock_guard lock(mutex_);
  regions_[id] = region;
}

void NamedRegions::remove(uint64_t id, bool is_revoked) {
  std::lock_guard lock(mutex_);
  if (is_revoked) revoked_.push_back(id);  // first: there may be no memory for it
  regions_.erase(id);
  if (revoked_.size() > kRevokedKept) revoked_.pop_front();
}

RegionUse NamedRegions::use(uint64_t id) {
  RegionRef region;
  {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    if (found == regions_.end() || !found->second->try_add_ref()) return {};
    region = RegionRef::adopt(found->second);
  }
  return {std::move(region), id};
}

Status NamedRegions::status_of_gone(uint64_t id) {
  std::lock_guard lock(mutex_);
  return std::ranges::find(revoked_, id) == revoked_.end() ? Status::kRegionClosed : Status::kRegionRevoked;
}

}  // namespace crossrail
