#include "transport/tcp/region_table.h"

#include <sys/mman.h>

#include <mutex>
#include <string>

#include "util/errors.h"

namespace crossrail::tcp {

TcpRegion::~TcpRegion() {
  table_->remove(*this);
  if (owns_memory) munmap(base, length_bytes);
}

std::unique_ptr<TcpRegion> RegionTable::add(uint64_t id, std::byte* base, uint64_t length_bytes, Access access,
                                            bool owns_memory, int gpu) {
  auto region = std::make_unique<TcpRegion>(this, access, owns_memory);
  region->base = base;
  region->length_bytes = length_bytes;
  region->id = id;
  region->gpu = gpu;
  std::lock_guard lock(lock_);
  open_[id] = region.get();
  return region;
}

std::unique_ptr<TcpRegion> RegionTable::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (populate ? MAP_POPULATE : 0);
  void* memory = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap", "cannot allocate " + std::to_string(length_bytes) + " bytes");
  madvise(memory, length_bytes, MADV_HUGEPAGE);  // fewer faults and TLB misses; a kernel without them says no
  return add(id, static_cast<std::byte*>(memory), length_bytes, Access::kRemoteWrite, true);
}

void RegionTable::revoke(TcpRegion& region) {
  std::lock_guard lock(lock_);
  open_.erase(region.id);
  region.revoked.store(true, std::memory_order_relaxed);
  // release: pairs with the acquire in revocations(): who sees the new number sees the flag.
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
