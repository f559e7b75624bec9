#include "transport/rdma/region.h"

namespace crossrail::rdma {

RdmaRegion::~RdmaRegion() {
  tables_.regions->forget(*this);
  if (registered != nullptr && !is_revoked_) revoke();
}

RdmaKeys RdmaRegion::rdma_keys() const {
  const Registration* const known = registered->any();
  RdmaKeys keys{.base = known == nullptr ? 0 : known->remote_base, .keys = {}};
  for (const auto& registration : registered->by_rail) keys.keys.push_back(registration->key);
  return keys;
}

std::string RdmaRegion::given_by() const {
  const Registration* const known = registered->any();
  return known == nullptr ? std::string() : known->given_by;
}

void RdmaRegion::revoke() const {
  is_revoked_ = true;
  is_shared_on_ = !tables_.shared->leave(*this);
  if (!is_shared_on_) registered->revoke();
}

bool RdmaRegion::is_quiet() const {
  std::lock_guard lock(revoking_);
  if (!is_revoked_) revoke();
  return is_shared_on_ || registered->is_quiet();
}

void RegionTable::add(RdmaRegion& region) {
  std::lock_guard lock(mutex_);
  open_[region.id] = &region;
  living_.insert(&region);
}

void RegionTable::remove(const RdmaRegion& region) {
  std::lock_guard lock(mutex_);
  const auto found = open_.find(region.id);
  if (found != open_.end() && found->second == &region) open_.erase(found);
}

void RegionTable::forget(const RdmaRegion& region) {
  remove(region);
  std::lock_guard lock(mutex_);
  living_.erase(&region);
}

bool RegionTable::revoke_all() {
  std::lock_guard lock(mutex_);
  open_.clear();
  bool all_quiet = true;
  for (const RdmaRegion* region : living_) all_quiet = region->is_quiet() && all_quiet;
  return all_quiet;
}

Status RegionTable::verdict(const Span& span) const {
  std::lock_guard lock(mutex_);
  const auto found = open_.find(span.region_id);
  if (found == open_.end()) return Status::kRegionClosed;
  const RdmaRegion& region = *found->second;
  if (!fits(span.offset, span.length_bytes, region.length_bytes)) return Status::kOutOfBounds;
  if (span.writes && !allows(region.access, Access::kRemoteWrite)) return Status::kAccessDenied;
  if (span.reads && !allows(region.access, Access::kRemoteRead)) return Status::kAccessDenied;
  return Status::kDone;
}

}  // namespace crossrail::rdma
