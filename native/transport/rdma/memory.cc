// Regions of an engine, at each of its NICs.
#include <algorithm>
#include <atomic>

#include "transport/rdma/rdma_transport.h"
#include "util/anonymous_pages.h"
#include "util/errors.h"

namespace crossrail::rdma {

namespace {

// At a rail whose device is gone: it refuses all that it is asked for, and nobody reaches anything by it.
class NoRegistration final : public Registration {
 public:
  NoRegistration() { key = kNoKey; }
  void revoke() override {}
  bool is_quiet() const override { return true; }
};

}  // namespace

// With every device once.
void RdmaTransport::register_on(uint32_t rail, Registrations& registered, const RegisterAt& register_at) {
  Nic& nic = *rails_[rail]->nic;
  // acquire: pairs with the release in on_device_fatal: whoever posts from this region finds the rail down.
  if (rails_[rail]->is_dead.load(std::memory_order_acquire)) {
    registered.by_rail.push_back(std::make_shared<NoRegistration>());
    return;
  }
  const auto has_it = [&](const auto& other) {
    return nic.shares_registrations_with(*other->nic) && is_known_at(registered.by_rail[other->index]);
  };
  const auto end = rails_.begin() + rail;
  const auto found = std::find_if(rails_.begin(), end, has_it);
  registered.by_rail.push_back(found == end ? std::shared_ptr<Registration>(register_at(nic))
                                            : registered.by_rail[(*found)->index]);
}

// A source that no NIC knows is one that nothing goes out from, but revoke() needs it. Memory for peers that none of
// them reaches is a mistake, unless other transports have it, too.
void RdmaTransport::check_reach(const RdmaRegion& region) const {
  const bool is_alone = address_.transports == transport_bit(kind_);
  if (region.access == Access::kLocal || !is_alone || std::ranges::any_of(region.registered->by_rail, is_known_at))
    return;
  std::string names;
  for (const auto& rail : rails_) names += (names.empty() ? "" : ", ") + rail->nic->name();
  throw TransportError("register", EIO, "the devices of all rails are gone: " + names, "open the engine again");
}

// With every NIC that is left, or with none: what is registered already goes with the region when one throws.
std::unique_ptr<LocalRegion> RdmaTransport::add_region(std::unique_ptr<RdmaRegion> region, uint64_t id,
                                                       const RegisterAt& register_at) {
  region->id = id;
  if (!shared_.join(*region)) {
    region->registered = std::make_shared<Registrations>();
    for (uint32_t rail = 0; rail < rails_.size(); ++rail) register_on(rail, *region->registered, register_at);
    check_reach(*region);
    shared_.add(*region);
  }
  regions_.add(*region);
  return region;
}

std::unique_ptr<RdmaRegion> RdmaTransport::make_region(std::byte* base, uint64_t length_bytes, Access access,
                                                       bool is_gpu) {
  auto region = std::make_unique<RdmaRegion>(RdmaRegion::Tables{&regions_, &shared_}, access, is_gpu);
  region->base = base;
  region->length_bytes = length_bytes;
  return region;
}

std::unique_ptr<LocalRegion> RdmaTransport::register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                                            Access access) {
  return add_region(make_region(base, length_bytes, access), id,
                    [&](Nic& nic) { return nic.register_memory(base, length_bytes, access); });
}

std::unique_ptr<LocalRegion> RdmaTransport::register_gpu_memory(uint64_t id, const device::GpuMemory& memory,
                                                                Access access) {
  return add_region(make_region(memory.base(), memory.length_bytes(), access, true), id,
                    [&](Nic& nic) { return nic.register_gpu_memory(memory, access); });
}

std::unique_ptr<LocalRegion> RdmaTransport::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  AnonymousPages pages(length_bytes, populate);
  std::byte* const base = pages.base();
  auto region = make_region(base, length_bytes, Access::kRemoteWrite);
  region->pages = std::move(pages);
  return add_region(std::move(region), id,
                    [&](Nic& nic) { return nic.register_memory(base, length_bytes, Access::kRemoteWrite); });
}

// No NIC tells who is at a region, and none but a peer that has a path can be.
std::vector<std::string> RdmaTransport::users_of(const LocalRegion&) {
  std::vector<std::string> names;
  for (const auto& [key, session] : sessions_) {
    const bool is_joined =
        std::ranges::any_of(session->paths, [](const auto& path) { return path->nic_path != nullptr; });
    if (is_joined) names.push_back(session->peer_name);
  }
  return names;
}

void RdmaTransport::revoke_region(LocalRegion& region) {
  regions_.remove(static_cast<RdmaRegion&>(region));
  wake();  // a NIC may need the holder to see the revocation through
}

bool RdmaTransport::is_region_quiet(const LocalRegion& region) {
  return static_cast<const RdmaRegion&>(region).is_quiet();
}

}  // namespace crossrail::rdma
