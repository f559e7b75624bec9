#include "bench/rig.h"

#include <sys/mman.h>

#include <cstring>
#include <string>

#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::bench {
namespace {

constexpr double kCloseTimeoutS = 0.2;

template <typename T>
T& at(const std::vector<Ref<T>>& items, size_t index, const char* what) {
  if (index < items.size()) return *items[index];
  throw UsageError(std::string(what) + " is " + std::to_string(index) + ", and the rig has " +
                   std::to_string(items.size()));
}

}  // namespace

Rig::Rig(const EngineOptions& options) : engine_(Engine::open(options)) {}

Rig::~Rig() { close(); }

void Rig::close() {
  if (!engine_) return;
  groups_.clear();
  remotes_.clear();
  counters_.clear();
  if (pool_) pool_->close();
  pool_ = nullptr;
  engine_->close(deadline_in(kCloseTimeoutS));
  bool all_closed = true;
  for (const RegionRef& region : regions_) {
    all_closed &= region->close(deadline_in(kCloseTimeoutS), {}) != WaitResult::kTimeout;
  }
  regions_.clear();
  engine_ = nullptr;
  // Memory that something may still touch is leaked rather than reused.
  if (all_closed) unmap_all();
}

void Rig::unmap_all() {
  for (const Mapping& mapping : mappings_) munmap(mapping.base, mapping.length_bytes);
  mappings_.clear();
}

Engine& Rig::engine() {
  if (!engine_) throw EngineClosedError("the rig was closed");
  return *engine_;
}

size_t Rig::alloc(uint64_t length_bytes) {
  regions_.push_back(engine().alloc(length_bytes, true));
  return regions_.size() - 1;
}

size_t Rig::map_private(uint64_t length_bytes) {
  void* base = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    throw_errno("mmap", "cannot map " + std::to_string(length_bytes) + " bytes", "use smaller pools (--pool-bytes)");
  }
  mappings_.push_back({base, length_bytes});
  std::memset(base, 1, length_bytes);
  regions_.push_back(engine().register_memory(base, length_bytes, Access::kRemoteWrite));
  return regions_.size() - 1;
}

size_t Rig::remote(std::span<const uint8_t> descriptor) {
  remotes_.push_back(engine().remote_region(RegionDescriptor::decode(descriptor)));
  return remotes_.size() - 1;
}

size_t Rig::group(const std::vector<Bytes>& addresses) {
  std::vector<Address> decoded;
  decoded.reserve(addresses.size());
  for (const Bytes& address : addresses) decoded.push_back(Address::decode(address));
  groups_.push_back(engine().add_peer_group(decoded));
  return groups_.size() - 1;
}

Region& Rig::region(size_t index) const { return at(regions_, index, "region"); }

RemoteRegion& Rig::remote_region(size_t index) const { return at(remotes_, index, "remote region"); }

PeerGroup& Rig::peer_group(size_t index) const { return at(groups_, index, "group"); }

std::span<std::byte> Rig::memory(size_t index) const {
  const Region& own = region(index);
  return {own.base(), own.length_bytes()};
}

ImmCounter* Rig::counter(uint32_t imm) {
  for (const Ref<ImmCounter>& counter : counters_) {
    if (counter->imm() == imm) return counter.get();
  }
  counters_.push_back(engine().imm_counter(imm));
  return counters_.back().get();
}

PeerRef Rig::peer(std::span<const uint8_t> address) { return engine().peer(Address::decode(address)); }

ReceivePool& Rig::pool() {
  if (!pool_) pool_ = engine().submit_recvs(kPoolMessages, kPoolMessageBytes);
  return *pool_;
}

void Rig::drive(double seconds, Guard& guard) {
  const int64_t end_ns = deadline_in(seconds);
  while (now_ns() < end_ns) {
    engine().progress();
    guard.tick();
  }
}

}  // namespace crossrail::bench
