#include "transport/tcp/region_table.h"

#include <mutex>
#include <utility>

namespace crossrail::tcp {

TcpRegion::~TcpRegion() { table_->remove(*this); }

std::unique_ptr<TcpRegion> RegionTable::add(uint64_t id, std::byte* base, uint64_t length_bytes, Access access, int gpu,
                                            bool maps_file) {
  auto region = std::make_unique<TcpRegion>(this, access);
  region->base = base;
  region->length_bytes = length_bytes;
  region->id = id;
  region->gpu = gpu;
  region->maps_file = maps_file;
  std::lock_guard lock(lock_);
  open_[id] = region.get();
  return region;
}

std::unique_ptr<TcpRegion> RegionTable::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  AnonymousPages pages(length_bytes, populate);
  auto region = add(id, pages.base(), length_bytes, Access::kRemoteWrite);
  region->pages = std::move(pages);
  return region;
}

void RegionTable::revoke(TcpRegion& region) {
  std::lock_guard lock(lock_);
  open_.erase(region.id);
  region.revoked.store(true, std::memory_order_relaxed);
  // release: pairs with the acquire in revocations(): whoever sees the new number sees the flag.
  revocations_.fetch_add(1, std::memory_order_release);
}

RegionUse RegionTable::use(uint64_t id) {
  std::lock_guard lock(lock_);
  const auto found = open_.find(id);
  if (found == open_.end()) return RegionUse();
  // relaxed: revoke() takes the same lock before is_quiet() is asked.
  found->second->users.fetch_add(1, std::memory_order_relaxed);
  return RegionUse(found->second);
}

void RegionTable::remove(const TcpRegion& region) {
  std::lock_guard lock(lock_);
  const auto found = open_.find(region.id);
  if (found != open_.end() && found->second == &region) open_.erase(found);
}

}  // namespace crossrail::tcp
