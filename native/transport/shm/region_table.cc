#include "transport/shm/region_table.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>

#include "util/errors.h"

namespace crossrail::shm {

namespace {

// Allocates all pages of the file; 0 or an errno. In pieces: when a signal arrives, kernels undo what the call has
// allocated so far (EINTR), and with a timer a long call would never finish.
int fill_in(const MemoryMap& map) {
  constexpr off_t kPieceBytes = 2 << 20;
  const auto bytes = static_cast<off_t>(map.size());
  for (off_t at = 0; at < bytes;) {
    const off_t length = std::min(kPieceBytes, bytes - at);
    const int failure = posix_fallocate(map.fd(), at, length);
    if (failure == 0) at += length;
    if (failure != 0 && failure != EINTR) return failure;
  }
  return 0;
}

}  // namespace

ShmRegion::~ShmRegion() { table_->revoke(*this); }

void RegionTable::Deleter::operator()(Target* targets) const { std::free(targets); }

// calloc: the table is large and mostly unused, so most of it never becomes resident.
RegionTable::RegionTable(Sink* sink)
    : open_map_(MemoryMap::create("crossrail-open", sizeof(OpenRegions), MemoryMap::Writers::kOwner)),
      seen_(reinterpret_cast<OpenRegions*>(open_map_->data())),
      sink_(sink),
      targets_(static_cast<Target*>(std::calloc(kRegionSlots, sizeof(Target)))) {
  if (targets_ == nullptr) throw std::bad_alloc();
  seen_->magic = kOpenRegionsMagic;
  seen_->version = kLayoutVersion;
}

std::unique_ptr<ShmRegion> RegionTable::add(uint64_t id, std::byte* base, uint64_t length_bytes, Access access, int gpu,
                                            device::SharedRange shared) {
  auto region = std::make_unique<ShmRegion>(this, access);
  region->base = base;
  region->length_bytes = length_bytes;
  region->id = id;
  region->gpu = gpu;
  region->shared = std::move(shared);
  const uint32_t slot = region_slot(id);
  std::lock_guard lock(mutex_);
  // Engine-owned memory, or a part of it: peers can map it.
  auto after = maps_.upper_bound(base);
  if (after != maps_.begin()) {
    const auto candidate = std::prev(after);
    if (auto map = candidate->second.lock()) {
      const auto offset = static_cast<uint64_t>(base - candidate->first);
      if (offset <= map->size() && length_bytes <= map->size() - offset) {
        region->map = std::move(map);
        region->map_offset = offset;
        region->is_mapped = true;
      }
    }
  }
  Target& target = targets_[slot];
  target.base = base;
  target.length_bytes = length_bytes;
  target.access = access;
  target.gpu = gpu;
  open_[region->id] = region.get();
  // release: everything above is visible to whoever sees the id (find() acquires).
  target.id.store(region->id, std::memory_order_release);
  seen_->ids[slot].store(region->id, std::memory_order_release);
  return region;
}

std::unique_ptr<ShmRegion> RegionTable::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  auto map = MemoryMap::create("crossrail-region", length_bytes);
  if (populate) {
    if (const int failure = fill_in(*map); failure != 0) {
      errno = failure;
      throw_errno("fallocate", "cannot populate " + std::to_string(length_bytes) + " bytes",
                  "ask for less, or populate=False");
    }
    // Also maps the pages; older kernels lack this, and the first access does it there.
    madvise(map->data(), map->size(), MADV_POPULATE_WRITE);
  }
  {
    std::lock_guard lock(mutex_);
    if (maps_.size() >= maps_sweep_at_) {
      std::erase_if(maps_, [](const auto& item) { return item.second.expired(); });
      maps_sweep_at_ = 2 * (maps_.size() + 1);
    }
    maps_[map->data()] = map;
  }
  auto region = add(id, map->data(), length_bytes, Access::kRemoteWrite);
  CROSSRAIL_ASSERT(region->map == map);
  return region;
}

Status RegionTable::revoke(const ShmRegion& region) {
  std::lock_guard lock(mutex_);
  open_.erase(region.id);
  return withdraw(region.id);
}

void RegionTable::revoke_all() {
  std::lock_guard lock(mutex_);
  for (const auto& [id, region] : open_) withdraw(id);
  open_.clear();
}

Status RegionTable::withdraw(uint64_t region_id) {
  const Status why = sink_->status_of_gone(region_id);
  const uint32_t slot = region_slot(region_id);
  uint64_t expected = region_id;
  uint64_t expected_by_peers = region_id;
  // seq_cst, both: pair with the seq_cst hazard store and id load of a toucher (find() in execute_write, and
  // ShmTransport::touch): either it sees that the id is gone, or our later check of the hazards sees it at work.
  targets_[slot].id.compare_exchange_strong(expected, 0, std::memory_order_seq_cst);
  seen_->ids[slot].compare_exchange_strong(
      expected_by_peers, why == Status::kRegionRevoked ? region_id | kRevokedId : 0, std::memory_order_seq_cst);
  return why;
}

void RegionTable::add_toucher(uint64_t link_id, std::string name, std::shared_ptr<MemoryMap> segment, Fd process) {
  std::lock_guard lock(mutex_);
  touchers_[link_id] = {std::move(name), std::move(segment), std::move(process)};
}

void RegionTable::drop_toucher(uint64_t link_id) {
  std::lock_guard lock(mutex_);
  if (const auto found = touchers_.find(link_id); found != touchers_.end()) found->second.is_dropped = true;
}

bool RegionTable::forget_gone() {
  std::lock_guard lock(mutex_);
  std::erase_if(touchers_, [](const auto& item) { return item.second.is_dropped && item.second.is_gone(); });
  return std::ranges::any_of(touchers_, [](const auto& item) { return item.second.is_dropped; });
}

void RegionTable::drop_idle_touchers() {
  std::lock_guard lock(mutex_);
  std::erase_if(touchers_, [](const auto& item) { return !item.second.is_at(0); });
}

bool RegionTable::Toucher::is_at(uint64_t region_id) const {
  // seq_cst: see withdraw().
  const uint64_t hazard = reinterpret_cast<const LinkSegment*>(segment->data())->hazard.load(std::memory_order_seq_cst);
  if (hazard == 0 || (region_id != 0 && hazard != region_id)) return false;
  return !is_dead();
}

// Dead processes touch nothing. Their hazard stays as it was, and after close() nobody tells us of their end.
bool RegionTable::Toucher::is_dead() const {
  pollfd exited{.fd = process.get(), .events = POLLIN, .revents = 0};
  return process && poll(&exited, 1, 0) == 1;
}

bool RegionTable::Toucher::is_gone() const {
  if (!process || is_dead()) return true;
  const auto& link = *reinterpret_cast<const LinkSegment*>(segment->data());
  // acquire: pairs with the store in flush_link, after which the initiator sets no hazard; an earlier one is visible.
  return link.revoked.load(std::memory_order_acquire) != 0 && link.hazard.load(std::memory_order_acquire) == 0;
}

bool RegionTable::is_touched(uint64_t region_id) {
  // An initiator that is listed after this was also welcomed after it, and finds the id withdrawn.
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(touchers_, [&](const auto& item) { return item.second.is_at(region_id); });
}

std::vector<std::string> RegionTable::touchers_of(uint64_t region_id) {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [link_id, toucher] : touchers_) {
    if (toucher.is_at(region_id)) names.push_back(toucher.name);
  }
  return names;
}

RegionFacts RegionTable::facts(uint64_t region_id) {
  std::lock_guard lock(mutex_);
  RegionFacts facts;
  const auto found = open_.find(region_id);
  if (found == open_.end()) {
    facts.status = sink_->status_of_gone(region_id);
    return facts;
  }
  const ShmRegion& region = *found->second;
  facts.status = Status::kDone;
  facts.access = region.access;
  facts.base = reinterpret_cast<uint64_t>(region.base);
  facts.length_bytes = region.length_bytes;
  facts.map = region.map;
  facts.map_offset = region.map_offset;
  facts.is_gpu = region.gpu >= 0;
  facts.shared = region.shared;
  return facts;
}

const RegionTable::Target* RegionTable::find(uint64_t region_id) const {
  const Target& target = targets_[region_slot(region_id)];
  return region_id != 0 && target.id.load(std::memory_order_seq_cst) == region_id ? &target : nullptr;
}

}  // namespace crossrail::shm
