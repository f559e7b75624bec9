#include "engine/transports.h"

#include <utility>

#include "engine/engine.h"
#include "engine/rail_names.h"
#include "transport/identity.h"
#include "transport/open.h"
#include "util/errors.h"

namespace crossrail {

// --- LocalRegions ---

LocalRegions::LocalRegions(LocalRegions&& other) noexcept
    : ids_(std::exchange(other.ids_, nullptr)),
      id_(other.id_),
      base_(other.base_),
      length_bytes_(other.length_bytes_),
      memory_(other.memory_),
      gpu_(other.gpu_),
      needs_flush_(other.needs_flush_),
      is_for_mapping_(other.is_for_mapping_),
      halves_(std::move(other.halves_)) {}

LocalRegions::~LocalRegions() {
  for (size_t i = halves_.size(); i > 0; --i) halves_[i - 1].reset();
  if (ids_ != nullptr) ids_->give_back(id_);
}

void LocalRegions::leak() {
  for (auto& half : halves_) static_cast<void>(half.release());
  ids_ = nullptr;
}

void LocalRegions::swap(LocalRegions& other) noexcept {
  std::swap(ids_, other.ids_);
  std::swap(id_, other.id_);
  std::swap(base_, other.base_);
  std::swap(length_bytes_, other.length_bytes_);
  std::swap(memory_, other.memory_);
  std::swap(gpu_, other.gpu_);
  std::swap(needs_flush_, other.needs_flush_);
  std::swap(is_for_mapping_, other.is_for_mapping_);
  halves_.swap(other.halves_);
}

std::string LocalRegions::given_by() const {
  if (memory_ == MemoryKind::kHost) return {};
  for (const auto& half : halves_) {
    if (half == nullptr) continue;
    if (std::string by_nics = half->given_by(); !by_nics.empty()) return by_nics;
  }
  return "no: no NIC reads or writes it";
}

// --- TransportSet ---

namespace {

uint32_t mask_of(const EngineOptions& options) {
  uint32_t mask = 0;
  for (const TransportKind kind : options.transports) mask |= transport_bit(kind);
  return mask;
}

constexpr uint32_t kNetworkTransports = transport_bit(TransportKind::kTcp) | kRdmaTransports;

// shm moves bytes with one core, however many rails it has; several are there for tests, and next to a network's rails
// they only cost memory.
uint32_t rails_of(TransportKind kind, const EngineOptions& options, uint32_t mask) {
  const bool is_network = (transport_bit(kind) & kNetworkTransports) != 0;
  return !is_network && (mask & kNetworkTransports) != 0 ? 1 : options.rail_count;
}

TransportOptions options_for(TransportKind kind, const EngineOptions& options, Place place, Address identity) {
  const bool is_network = (transport_bit(kind) & kNetworkTransports) != 0;
  const uint32_t rail_count = rails_of(kind, options, identity.transports);
  return {.identity = std::move(identity),
          .rail_count = rail_count,
          .rails = is_network ? options.rails : std::vector<std::string>{},
          .port = options.port,
          .secret = options.secret,
          .tls = options.tls,
          .peer_timeout_ns = options.peer_timeout_ns,
          .message_bytes_max = options.message_bytes_max,
          .connect_timeout_ns = options.connect_timeout_ns,
          .private_path = options.private_path,
          .rdma = options.rdma,
          .clock = place.simulation != nullptr ? place.simulation : &real_clock(),
          .entropy = place.simulation != nullptr ? place.simulation : &kernel_entropy(),
          .place = place};
}

std::string why_no_hardware(TransportKind kind, const EngineOptions& options, std::span<const RdmaPort> ports) {
  if (std::string missing = rdma_missing(kind, options.rdma.provider); !missing.empty()) return missing;
  for (const RdmaPort& port : ports) {
    if (!port.is_software) return port.name + ": " + port.trouble;
  }
  return "only software devices here, slower than tcp";
}

// An error, not a silent fallback: peers on this host would be reached by tcp for as long as the engine lives. But
// whoever cannot fix what shm lacks can do without it.
std::unique_ptr<Transport> open_or_name_tcp(TransportKind kind, const TransportOptions& options, Sink* sink) {
  try {
    return open_transport(kind, options, sink);
  } catch (const TransportError& error) {
    const bool is_of_shm = kind == TransportKind::kShm && error.call() != "pthread_create";  // tcp has threads, too
    const bool may_do_without = is_of_shm && options.identity.has(TransportKind::kTcp);
    if (!may_do_without) throw;
    const std::string remedy = "open the engine with transport='tcp', which needs no shared memory";
    throw TransportError(error.call(), error.code(), error.text(),
                         error.remedy().empty() ? remedy : error.remedy() + "; or " + remedy);
  }
}

bool any_hardware(std::span<const RdmaPort> ports) {
  return std::ranges::any_of(ports, [](const RdmaPort& port) { return !port.is_software && port.trouble.empty(); });
}

}  // namespace

TransportSet::TransportSet(const EngineOptions& options, Place place, Sink* sink) {
  const uint32_t mask = mask_of(options);
  Address identity = place.simulation != nullptr
                         ? make_identity_on(*place.simulation, place.host, options.name, mask)
                         : make_identity(options.name, mask, rails_of(TransportKind::kShm, options, mask));
  Opened opened;
  EngineOptions rest = options;
  if (options.adds_rdma) rest.rails = add_rdma(options, &identity, &opened, sink);
  if (!options.rails.empty()) rest.rail_count = std::max<uint32_t>(1, static_cast<uint32_t>(rest.rails.size()));
  for (uint32_t number = kTransportKinds; number > 0; --number) {
    const auto kind = static_cast<TransportKind>(number);
    if ((mask & transport_bit(kind)) == 0) continue;
    opened[number] = open_or_name_tcp(kind, options_for(kind, rest, place, identity), sink);
    identity = opened[number]->address();
  }
  keep(std::move(opened), place.simulation != nullptr);
  for (uint32_t i = 0; i < size_; ++i) transports_[i]->complete_address(identity);
}

// Opens verbs, else ofi, and works out what rails= means to the others.
std::vector<std::string> TransportSet::add_rdma(const EngineOptions& options, Address* identity, Opened* opened,
                                                Sink* sink) {
  std::vector<std::string> rails_left = options.rails;
  for (const TransportKind kind : {TransportKind::kVerbs, TransportKind::kOfi}) {
    if (options.tls.is_on()) {
      absent_.push_back({kind, "the engine has tls, and bytes over RDMA are not under TLS", false});
      continue;
    }
    const std::vector<RdmaPort> ports = rdma_ports(kind, options.rdma.provider);
    if (!any_hardware(ports)) {
      absent_.push_back({kind, why_no_hardware(kind, options, ports), false});
      continue;
    }
    const RailNames names = split_rail_names(options.rails, ports);
    rails_left = names.tcp;
    if (names.rdma.empty() && !options.rails.empty()) {
      absent_.push_back({kind, "rails= names none of its ports", false});
      continue;
    }
    Address with = *identity;
    with.transports |= transport_bit(kind);
    TransportOptions own = options_for(kind, options, {}, std::move(with));
    own.rails = names.rdma;
    own.rail_count = names.rdma.empty() ? own.rail_count : static_cast<uint32_t>(names.rdma.size());
    try {
      auto& transport = (*opened)[static_cast<size_t>(kind)] = open_transport(kind, own, sink);
      *identity = transport->address();
      break;
    } catch (const TransportError& error) {  // the device is there, so its failure must be reported
      absent_.push_back({kind, error.what(), true});
    }
  }
  return rails_left;
}

void TransportSet::keep(Opened opened, bool is_simulated) {
  for (uint32_t number = 1; number <= kTransportKinds; ++number) {
    if (opened[number] == nullptr) continue;
    kinds_[size_] = static_cast<TransportKind>(number);
    transports_[size_] = std::move(opened[number]);
    sleepers_[size_] = transports_[size_].get();
    traits_[size_] = transports_[size_]->traits();
    rail_devices_[size_] = transports_[size_]->rail_devices();
    rail_count_ = std::max(rail_count_, traits_[size_].rail_count);
    ++size_;
  }
  first_ = sleepers_[0];
  if (!is_simulated) sleeping_place_ = std::make_unique<SleepingPlace>(std::span(sleepers_.data(), size_));
}

Route TransportSet::choose(const Address& peer) const {
  const auto index_of = [this](TransportKind kind) {
    return static_cast<uint32_t>(std::find(kinds_.begin(), kinds_.begin() + size_, kind) - kinds_.begin());
  };
  ChosenTransport chosen = choose_transport(
      address(), peer, absent_, [&](TransportKind kind) { return sleepers_[index_of(kind)]->why_out_of_reach(peer); });
  const uint32_t index = index_of(chosen.kind);
  return {sleepers_[index], &traits_[index], index, chosen.kind, std::move(chosen.reason)};
}

LocalRegions TransportSet::register_memory(std::byte* base, uint64_t length_bytes, Access access, MemoryKind memory) {
  if (memory == MemoryKind::kCuda) return register_gpu_memory(base, length_bytes, access);
  LocalRegions region(&region_ids_, base, length_bytes);
  for (uint32_t i = 0; i < size_; ++i) {
    region.halves_[i] = transports_[i]->register_memory(region.id_, base, length_bytes, access);
  }
  return region;
}

uint32_t TransportSet::gpu_transports() const {
  uint32_t mask = 0;
  for (uint32_t i = 0; i < size_; ++i) mask |= traits_[i].moves_gpu_memory ? transport_bit(kinds_[i]) : 0;
  return mask;
}

std::string TransportSet::no_gpu_memory() const {
  for (uint32_t i = 0; i < size_; ++i)
    if (!traits_[i].no_gpu_memory.empty()) return traits_[i].no_gpu_memory;
  return {};
}

void TransportSet::check_moves_gpu_memory() const {
  if (std::any_of(traits_.begin(), traits_.begin() + size_,
                  [](const Traits& each) { return each.moves_gpu_memory || each.copies_gpu_memory; }))
    return;
  throw TransportError("register", 0,
                       "the memory is a GPU's, and this engine's transport, " + transport_names(address().transports) +
                           ", moves host memory only",
                       no_gpu_memory().empty() ? "open the engine with another: transport='auto'" : no_gpu_memory());
}

LocalRegions TransportSet::register_gpu_memory(std::byte* base, uint64_t length_bytes, Access access) {
  check_moves_gpu_memory();
  const bool for_nics = gpu_transports() != 0;
  const device::GpuMemory memory(base, length_bytes, for_nics);
  LocalRegions region(&region_ids_, base, length_bytes);
  region.memory_ = MemoryKind::kCuda;
  region.gpu_ = memory.gpu().ordinal;
  region.needs_flush_ = for_nics && memory.gpu().needs_flush;
  for (uint32_t i = 0; i < size_; ++i) {
    if (traits_[i].moves_gpu_memory || traits_[i].copies_gpu_memory)
      region.halves_[i] = transports_[i]->register_gpu_memory(region.id_, memory, access);
  }
  return region;
}

LocalRegions TransportSet::allocate(uint64_t length_bytes, bool populate, bool is_for_mapping) {
  LocalRegions region(&region_ids_, nullptr, length_bytes);
  region.is_for_mapping_ = is_for_mapping;
  region.halves_[0] = first_->allocate(region.id_, length_bytes, populate);
  region.base_ = region.halves_[0]->base;
  for (uint32_t i = 1; i < size_ && !is_for_mapping; ++i) {
    region.halves_[i] = transports_[i]->register_memory(region.id_, region.base(), length_bytes, Access::kRemoteWrite);
    region.halves_[i]->maps_file = false;  // nobody truncates our own
  }
  return region;
}

void TransportSet::describe(const LocalRegions& region, RegionDescriptor* descriptor) const {
  for (uint32_t i = 0; i < size_; ++i) {
    if (!is_rdma(kinds_[i])) continue;
    // Transports without a half of it are not asked for keys: zeros, as many as a descriptor needs.
    descriptor->rdma_on(kinds_[i]) = region.halves_[i] != nullptr
                                         ? region.halves_[i]->rdma_keys()
                                         : RdmaKeys{0, std::vector<uint64_t>(traits_[i].rail_count)};
  }
}

void TransportSet::revoke_region(LocalRegions& region) {
  for (uint32_t i = 0; i < size_; ++i) {
    if (region.halves_[i] != nullptr) transports_[i]->revoke_region(*region.halves_[i]);
  }
}

bool TransportSet::is_region_quiet(const LocalRegions& region) const {
  for (uint32_t i = 0; i < size_; ++i) {
    if (region.halves_[i] != nullptr && !transports_[i]->is_region_quiet(*region.halves_[i])) return false;
  }
  return true;
}

std::vector<std::string> TransportSet::users_of(const LocalRegions& region) const {
  std::vector<std::string> names;
  for (uint32_t i = 0; i < size_; ++i) {
    if (region.halves_[i] == nullptr) continue;
    for (std::string& name : transports_[i]->users_of(*region.halves_[i])) names.push_back(std::move(name));
  }
  return names;
}

bool TransportSet::move_source(const LocalRegions& from, const LocalRegions& to) const {
  bool all = true;
  for (uint32_t i = 0; i < size_; ++i) {
    if (from.halves_[i] != nullptr) all = transports_[i]->move_source(*from.halves_[i], *to.halves_[i]) && all;
  }
  return all;
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
