#include "engine/transports.h"

#include <utility>

#include "engine/engine.h"
#include "transport/identity.h"
#include "transport/open.h"
#include "util/errors.h"

namespace crossrail {

// --- LocalRegions ---

LocalRegions::LocalRegions(LocalRegions&& other) noexcept
    : ids_(std::exchange(other.ids_, nullptr)), id_(other.id_), halves_(std::move(other.halves_)) {}

LocalRegions::~LocalRegions() {
  for (size_t i = halves_.size(); i > 0; --i) halves_[i - 1].reset();
  if (ids_ != nullptr) ids_->give_back(id_);
}

void LocalRegions::leak() {
  for (auto& half : halves_) static_cast<void>(half.release());
  ids_ = nullptr;
}

// --- TransportSet ---

namespace {

uint32_t mask_of(const EngineOptions& options) {
  uint32_t mask = 0;
  for (const TransportKind kind : options.transports) mask |= transport_bit(kind);
  return mask;
}

TransportOptions options_for(TransportKind kind, const EngineOptions& options, Address identity) {
  // shm moves bytes with one core either way; its rails are there to be tested, and beside tcp's they only cost memory.
  const bool is_tcp = kind == TransportKind::kTcp;
  const bool beside_tcp = !is_tcp && identity.has(TransportKind::kTcp);
  return {.identity = std::move(identity),
          .rail_count = beside_tcp ? 1 : options.rail_count,
          .rails = is_tcp ? options.rails : std::vector<std::string>{},
          .port = options.port,
          .secret = options.secret,
          .peer_timeout_ns = options.peer_timeout_ns,
          .message_bytes_max = options.message_bytes_max,
          .connect_timeout_ns = options.connect_timeout_ns,
          .private_path = static_cast<int>(options.private_path)};
}

}  // namespace

TransportSet::TransportSet(const EngineOptions& options, Sink* sink) {
  const uint32_t mask = mask_of(options);
  const uint32_t rails = (mask & transport_bit(TransportKind::kTcp)) != 0 ? 1 : options.rail_count;
  Address identity = make_identity(options.name, mask, rails);
  for (uint32_t kind = 1; kind <= kTransportKinds; ++kind) {
    if ((mask >> kind & 1) != 0) kinds_[size_++] = static_cast<TransportKind>(kind);
  }
  for (uint32_t i = size_; i > 0; --i) {
    transports_[i - 1] = open_transport(kinds_[i - 1], options_for(kinds_[i - 1], options, identity), sink);
    identity = transports_[i - 1]->address();
  }
  for (uint32_t i = 0; i < size_; ++i) {
    sleepers_[i] = transports_[i].get();
    traits_[i] = transports_[i]->traits();
    rail_count_ = std::max(rail_count_, traits_[i].rail_count);
  }
  first_ = sleepers_[0];
  for (uint32_t i = 0; i < size_; ++i) transports_[i]->complete_address(identity);
}

Route TransportSet::choose(const Address& peer) const {
  const Address& own = address();
  const bool is_near = same_host(own, peer);
  const uint32_t shared = own.transports & peer.transports;
  const auto route = [&](TransportKind kind, std::string reason) {
    const auto index = static_cast<uint32_t>(std::find(kinds_.begin(), kinds_.begin() + size_, kind) - kinds_.begin());
    return Route{sleepers_[index], &traits_[index], index, kind, std::move(reason)};
  };
  const auto asked_for = [](TransportKind kind) {
    return "asked for by transport='" + std::string(transport_name(kind)) + "'";
  };
  const char* const where = is_near                 ? "on this host"
                            : own.host == peer.host ? "in another network namespace of this host"
                                                    : "on another host";
  if ((shared & transport_bit(TransportKind::kShm)) != 0 && is_near)
    return route(TransportKind::kShm, "same host: shared memory");
  if ((shared & transport_bit(TransportKind::kTcp)) != 0) {
    if (!own.has(TransportKind::kShm)) return route(TransportKind::kTcp, asked_for(TransportKind::kTcp));
    return route(TransportKind::kTcp,
                 is_near ? "the peer has no shm: it asked for tcp" : std::string("it is ") + where);
  }
  if ((shared & transport_bit(TransportKind::kNull)) != 0)
    return route(TransportKind::kNull, asked_for(TransportKind::kNull));
  const std::string sides =
      "this engine has transport " + transport_names(own.transports) + ", the peer " + transport_names(peer.transports);
  if (is_near) {
    throw UsageError("peer '" + peer.name + "' cannot be reached: " + sides + ". Open both with the same transport");
  }
  throw UsageError("peer '" + peer.name + "' is " + where + ", where only tcp reaches: " + sides +
                   ". Open both with transport 'tcp' or 'auto'");
}

LocalRegions TransportSet::register_memory(std::byte* base, uint64_t length_bytes, Access access) {
  LocalRegions region(&region_ids_);
  for (uint32_t i = 0; i < size_; ++i) {
    region.halves_[i] = transports_[i]->register_memory(region.id_, base, length_bytes, access);
  }
  return region;
}

LocalRegions TransportSet::allocate(uint64_t length_bytes, bool populate) {
  LocalRegions region(&region_ids_);
  region.halves_[0] = first_->allocate(region.id_, length_bytes, populate);
  for (uint32_t i = 1; i < size_; ++i) {
    region.halves_[i] = transports_[i]->register_memory(region.id_, region.base(), length_bytes, Access::kRemoteWrite);
  }
  return region;
}

void TransportSet::describe(const LocalRegions& region, RegionDescriptor* descriptor) const {
  for (uint32_t i = 0; i < size_; ++i) {
    if (is_rdma(kinds_[i])) descriptor->rdma_on(kinds_[i]) = region.halves_[i]->rdma_keys();
  }
}

void TransportSet::revoke_region(LocalRegions& region) {
  for (uint32_t i = 0; i < size_; ++i) transports_[i]->revoke_region(*region.halves_[i]);
}

bool TransportSet::is_region_quiet(const LocalRegions& region) const {
  for (uint32_t i = 0; i < size_; ++i) {
    if (!transports_[i]->is_region_quiet(*region.halves_[i])) return false;
  }
  return true;
}

void TransportSet::withdraw(bool (*wanted)(void* context)) {
  for (uint32_t i = 0; i < size_; ++i) transports_[i]->withdraw(wanted);
}

void TransportSet::close() {
  for (uint32_t i = 0; i < size_; ++i) transports_[i]->close();
}

void TransportSet::abandon_after_fork() {
  for (uint32_t i = 0; i < size_; ++i) transports_[i]->abandon_after_fork();
}

}  // namespace crossrail
