#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

#include "engine/core.h"
#include "engine/page_indices.h"
#include "engine/sharding.h"

namespace crossrail {

namespace {

// Short enough that posting it on the caller's thread beats waking the worker.
constexpr uint64_t kShortBytes = 16 << 10;
constexpr uint64_t kShortPages = 64;
// From here on a copy would only push everything else out of the caches.
constexpr uint64_t kBulkBytes = uint64_t{1} << 20;

std::string text(uint64_t value) { return std::to_string(value); }

void check_option(bool ok, const char* name, const std::string& value, const char* bound) {
  if (!ok) throw UsageError(std::string(name) + " = " + value + " is not in " + bound);
}

void check_rdma(const RdmaOptions& options) {
  check_option(options.gid_index >= -1 && options.gid_index < 4096, "rdma.gid_index", std::to_string(options.gid_index),
               "-1..4095");
  check_option(options.traffic_class < 256, "rdma.traffic_class", text(options.traffic_class), "0..255");
  check_option(options.service_level < 16, "rdma.service_level", text(options.service_level), "0..15");
  check_option(options.path_mtu_bytes == 0 || (std::has_single_bit(options.path_mtu_bytes) &&
                                               options.path_mtu_bytes >= 256 && options.path_mtu_bytes <= 4096),
               "rdma.path_mtu", text(options.path_mtu_bytes), "256, 512, 1024, 2048, 4096, or 0: the port's");
}

void check_transports(const EngineOptions& options) {
  constexpr size_t kSecretBytesMax = 1024;
  uint32_t transports = 0;
  for (const TransportKind kind : options.transports) {
    if ((transports & transport_bit(kind)) != 0)
      throw UsageError("transports names " + std::string(transport_name(kind)) + " twice");
    transports |= transport_bit(kind);
  }
  if (transports == 0) throw UsageError("transports is empty: an engine has at least one");
  const bool simulated = (transports & transport_bit(TransportKind::kSim)) != 0;
  if (simulated && transports != transport_bit(TransportKind::kSim))
    throw UsageError("transport 'sim' goes with no other: its time is not theirs");
  if (simulated != (options.stage != nullptr))
    throw UsageError(simulated ? "transport 'sim' needs a world: open the engine inside `with sim.World():`, or by "
                                 "world.host(...).engine(...)"
                               : "an engine in a simulated world has transport 'sim' and no other");
  const std::string has = ", and the engine has transport " + transport_names(transports) + " only: open it with ";
  if ((transports & (transport_bit(TransportKind::kTcp) | kRdmaTransports)) == 0 && !options.rails.empty())
    throw UsageError("rails as a list of names needs a network" + has + "transport 'tcp', 'verbs', 'ofi' or 'auto'");
  if ((transports & transport_bit(TransportKind::kTcp)) == 0 && options.port != 0)
    throw UsageError("port = " + text(options.port) + " needs tcp" + has + "transport 'tcp' or 'auto'");
  check_rdma(options.rdma);
  check_option(options.rails.empty() || options.rails.size() == options.rail_count, "rails",
               "a list of " + text(options.rails.size()), "the lists of as many as there are rails");
  check_option(options.secret.size() <= kSecretBytesMax, "secret", "text of " + text(options.secret.size()) + " bytes",
               "0..1024 bytes");
  check_option(options.peer_timeout_ns > 0, "peer_timeout_s",
               std::to_string(static_cast<double>(options.peer_timeout_ns) * 1e-9), "the numbers above 0");
}

void check_options(const EngineOptions& options) {
  check_option(!options.name.empty() && options.name.size() <= 64, "name", "'" + options.name + "'", "1..64 bytes");
  check_option(options.rail_count >= 1 && options.rail_count <= kRailsMax, "rails", text(options.rail_count), "1..16");
  check_transports(options);
  check_option(options.submit_queue_depth >= 16 && options.submit_queue_depth <= 65536 &&
                   std::has_single_bit(options.submit_queue_depth),
               "submit_queue_depth", text(options.submit_queue_depth), "the powers of two 16..65536");
  check_option(options.imm_counters_max >= 1 && options.imm_counters_max <= (1u << 24), "imm_counters_max",
               text(options.imm_counters_max), "1..2**24");
  check_option(options.message_bytes_max >= 1 && options.message_bytes_max <= 256 * 1024, "message_bytes_max",
               text(options.message_bytes_max), "1..262144");
  check_option(options.spin_ns >= 0 && options.spin_ns <= 10'000'000'000, "spin_us",
               std::to_string(static_cast<double>(options.spin_ns) * 1e-3), "0..1e7");
  check_option(options.watcher_poll_ns >= 0 && options.watcher_poll_ns <= 1'000'000'000, "watcher_poll_us",
               std::to_string(static_cast<double>(options.watcher_poll_ns) * 1e-3), "0..1e6");
  check_option(options.connect_timeout_ns > 0, "connect_timeout_s",
               std::to_string(static_cast<double>(options.connect_timeout_ns) * 1e-9), "the numbers above 0");
  check_option(
      options.recorder_entries == 0 || (options.recorder_entries >= 64 && options.recorder_entries <= (1u << 20) &&
                                        std::has_single_bit(options.recorder_entries)),
      "recorder_entries", text(options.recorder_entries), "the powers of two 64..2**20, or 0: off");
  check_option(options.watchdog_ns >= 0, "watchdog_s", std::to_string(static_cast<double>(options.watchdog_ns) * 1e-9),
               "the numbers above 0");
  constexpr size_t kDirectoryBytesMax = 512;
  check_option(options.dump_directory.size() <= kDirectoryBytesMax, "dump_dir", "'" + options.dump_directory + "'",
               "the paths of at most 512 bytes");
  check_option(options.heartbeat_ns >= 0, "heartbeat_s",
               std::to_string(static_cast<double>(options.heartbeat_ns) * 1e-9), "the numbers above 0, or none");
  check_option(options.worker_cpu >= -1 && options.worker_cpu < 1024, "worker_cpu", std::to_string(options.worker_cpu),
               "-1..1023");
}

// The checks of every submit: what they throw is apart and cold, so that they are a few instructions each.
[[gnu::cold, noreturn]] void throw_range(const char* what, uint64_t offset, uint64_t length, uint64_t bound) {
  throw UsageError(std::string(what) + ": offset " + text(offset) + " + length " + text(length) +
                   " exceeds the region's " + text(bound) + " bytes");
}
// offset + length within bound, without overflow. `what` names the arguments.
inline void check_range(const char* what, uint64_t offset, uint64_t length, uint64_t bound) {
  if (length > bound || offset > bound - length) throw_range(what, offset, length, bound);
}

[[gnu::cold, noreturn]] void throw_imm(uint32_t imm) {
  throw UsageError("imm = " + text(imm) + " is not in 0..2**28-1");
}
inline void check_imm(uint32_t imm) {
  if (imm != kNoImm && imm > kImmMax) throw_imm(imm);
}

[[gnu::cold, noreturn]] void throw_rail(uint32_t rail, uint32_t rail_count) {
  throw UsageError("rail = " + text(rail) + " is not in 0.." + text(rail_count - 1) + ": the engine has " +
                   text(rail_count) + " rails");
}
inline void check_rail(uint32_t rail, uint32_t rail_count) {
  if (rail != kAnyRail && rail >= rail_count) throw_rail(rail, rail_count);
}

[[gnu::cold, noreturn]] void throw_local(const Region* region, const char* name, const Engine* engine,
                                         const Engine* owner) {
  if (region == nullptr) throw UsageError(std::string(name) + " is missing");
  if (engine != owner) throw UsageError(std::string(name) + " is a region of another engine");
  throw UsageError(std::string(name) + " is closed");
}
inline void check_local(const Region* region, const char* name, const Engine* engine, const Engine* owner) {
  if (region == nullptr || engine != owner || region->closed()) throw_local(region, name, engine, owner);
}

void check_group(const PeerGroup& group, const Engine* engine) {
  if (group.engine() != engine) throw UsageError("group is a peer group of another engine");
}

const char* access_name(Access access) {
  switch (access) {
    case Access::kLocal:
      return "local";
    case Access::kRemoteRead:
      return "read";
    case Access::kRemoteWrite:
      return "write";
  }
  return "?";
}

[[gnu::cold, noreturn]] void throw_remote(const RemoteRegion* region, const char* name, Access needed) {
  if (region == nullptr) throw UsageError(std::string(name) + " is missing");
  const Access access = region->descriptor().access;
  throw UsageError(std::string(name) + " has access '" + access_name(access) + "', '" + access_name(needed) +
                   "' is needed: its owner registered it so");
}
inline void check_remote(const RemoteRegion* region, const char* name, Access needed) {
  if (region != nullptr) {
    const Access access = region->descriptor().access;
    if (access == Access::kRemoteWrite || access == needed) return;
  }
  throw_remote(region, name, needed);
}

}  // namespace

const char* event_kind_name(EngineEvent::Kind kind) {
  switch (kind) {
    case EngineEvent::Kind::kImmOverflow:
      return "imm-overflow";
    case EngineEvent::Kind::kPeerConnected:
      return "peer-connected";
    case EngineEvent::Kind::kPeerLost:
      return "peer-lost";
    case EngineEvent::Kind::kPeerLeft:
      return "peer-left";
    case EngineEvent::Kind::kPeerSlow:
      return "peer-slow";
    case EngineEvent::Kind::kPeerFrozen:
      return "peer-frozen";
    case EngineEvent::Kind::kPeerThawed:
      return "peer-thawed";
    case EngineEvent::Kind::kChecksumMismatch:
      return "checksum-mismatch";
    case EngineEvent::Kind::kTransportAbsent:
      return "transport-absent";
    case EngineEvent::Kind::kStalled:
      return "stalled";
    case EngineEvent::Kind::kProtocolError:
      return "protocol-error";
  }
  return "unknown";
}

const char* peer_state_name(PeerState state) {
  switch (state) {
    case PeerState::kUnknown:
      return "unknown";
    case PeerState::kConnecting:
      return "connecting";
    case PeerState::kConnected:
      return "connected";
    case PeerState::kSlow:
      return "slow";
    case PeerState::kFrozen:
      return "frozen";
    case PeerState::kLost:
      return "lost";
  }
  return "?";
}

// Reads all that is to be sent: on the submitting thread, so that nobody else waits meanwhile.
static void verify(TransferWork& work) {
  const auto moves_nothing = [](const Peer& peer) { return peer.transport_kind() == TransportKind::kNull; };
  const bool is_scatter = work.kind == OpKind::kScatter;
  if (is_scatter ? std::ranges::any_of(work.targets, [&](const auto& target) { return moves_nothing(*target.peer); })
                 : moves_nothing(work.peer()))
    throw UsageError("verify needs a transport that moves bytes, and 'null' does not");
  make_verify_plan(work);
}

Peer::Peer(std::shared_ptr<const Address> address, Route route, std::shared_ptr<PeerTrack> track)
    : address_(std::move(address)),
      work_(std::make_unique<PeerWork>()),
      route_(std::move(route)),
      track_(std::move(track)) {}
Peer::~Peer() = default;

Engine::Engine(const EngineOptions& options) : core_(std::make_unique<EngineCore>(this, options)) {}

Engine::~Engine() {
  if (core_->forked()) {
    core_.release();  // threads and locks in it are the parent's
    return;
  }
  core_->close(0);
}

// The last reference may be a transfer's that the worker completes after its user dropped everything. The worker cannot
// join itself: somebody else ends the engine then.
void Engine::destroy() {
  if (core_->is_staged()) {
    const std::shared_ptr<Stage> stage = options().stage;  // outlives us
    stage->after_turn([this] { delete this; });
  } else if (core_->is_worker()) {
    std::thread([this] { delete this; }).detach();
  } else {
    delete this;
  }
}

Ref<Engine> Engine::open(const EngineOptions& options) {
  check_options(options);
  return Ref<Engine>::adopt(new Engine(options));
}

void Engine::close(Deadline drain_deadline) { core_->close(drain_deadline); }
bool Engine::closed() const { return core_->closed() || core_->forked(); }
const EngineOptions& Engine::options() const { return core_->options_; }
const Clock& Engine::clock() const { return core_->clock(); }
const Address& Engine::address() const { return core_->transports_.address(); }
uint32_t Engine::rail_count() const { return core_->transports_.rail_count(); }

// --- memory ---

RegionRef Engine::register_memory(void* base, uint64_t length_bytes, Access access) {
  core_->check_usable();
  if (base == nullptr) throw UsageError("the buffer's address is null");
  if (length_bytes == 0) throw UsageError("the buffer is empty: a region has at least one byte");
  if (length_bytes > (uint64_t{1} << 48))
    throw UsageError("the buffer's length " + text(length_bytes) + " exceeds 2**48");
  auto local = core_->transports_.register_memory(static_cast<std::byte*>(base), length_bytes, access);
  core_->region_made();
  return RegionRef::adopt(new Region(Ref<Engine>::share(this), std::move(local), access));
}

RegionRef Engine::alloc(uint64_t length_bytes, bool populate) {
  core_->check_usable();
  if (length_bytes == 0) throw UsageError("nbytes = 0: a region has at least one byte");
  if (length_bytes > (uint64_t{1} << 48)) throw UsageError("nbytes = " + text(length_bytes) + " exceeds 2**48");
  auto local = core_->transports_.allocate(length_bytes, populate);
  core_->region_made();
  return RegionRef::adopt(new Region(Ref<Engine>::share(this), std::move(local), Access::kRemoteWrite));
}

RegionRef Engine::register_phantom(uint64_t length_bytes) {
  core_->check_usable();
  if (options().stage == nullptr) {
    throw UsageError("register_phantom is for simulated engines: this one, with transport " +
                     transport_names(address().transports) + ", moves real bytes and needs real memory");
  }
  return register_memory(kPhantomBase, length_bytes, Access::kRemoteWrite);
}

RemoteRegionRef Engine::remote_region(const RegionDescriptor& descriptor) {
  core_->check_usable();
  const PeerRef owner = peer(descriptor.owner);
  std::lock_guard lock(core_->tables_mutex_);
  RemoteRegionRef& region = core_->remote_regions_[{descriptor.owner.incarnation, descriptor.region_id}];
  if (!region) {
    region = RemoteRegionRef::adopt(new RemoteRegion(owner, descriptor));
  } else if (!(region->descriptor() == descriptor)) {
    // Same id, other bounds: a forged or stale copy. It gets an object of its own; the target checks the truth.
    return RemoteRegionRef::adopt(new RemoteRegion(owner, descriptor));
  }
  return region;
}

// --- peers ---

PeerRef Engine::peer(const Address& peer_address) {
  core_->check_usable();
  return core_->add_peer(peer_address);
}

WaitResult Engine::connect(Peer& peer, Deadline deadline, const InterruptCheck& interrupted) {
  core_->check_usable();
  core_->run_as_holder([&] { core_->start_connect(peer); });
  const auto settled = [&] { return peer.state() != PeerState::kConnecting && peer.state() != PeerState::kUnknown; };
  const auto nap = [](Deadline until) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp<int64_t>(until - now_ns(), 0, 200'000)));
  };
  const WaitResult result = core_->wait_until(settled, nap, deadline, interrupted);
  if (result != WaitResult::kReady) return result;
  return peer.state() == PeerState::kLost ? WaitResult::kClosed : WaitResult::kReady;
}

WaitResult Engine::map(RemoteRegion& region, Deadline deadline, const InterruptCheck& interrupted, Mapping* mapping,
                       Status* status) {
  static constexpr int64_t kLookEveryNs = 200'000;
  Peer& peer = *region.peer();
  const WaitResult connected = connect(peer, deadline, interrupted);
  *status = Status::kPeerLost;
  if (connected != WaitResult::kReady)
    return connected == WaitResult::kClosed && !closed() ? WaitResult::kReady : connected;
  while (true) {
    core_->run_as_holder([&] { *status = core_->map(peer, region, mapping); });
    if (*status != Status::kPending) return closed() ? WaitResult::kClosed : WaitResult::kReady;
    // The peer is asked once per region and incarnation: a look now and then is cheap enough.
    const Deadline next_look = std::min(deadline, clock().now_ns() + kLookEveryNs);
    const auto nap = [](Deadline until) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp<int64_t>(until - now_ns(), 0, kLookEveryNs)));
    };
    const WaitResult waited = core_->wait_until([] { return false; }, nap, next_look, interrupted);
    if (waited != WaitResult::kTimeout || clock().now_ns() >= deadline) return waited;
  }
}

void Engine::forget_peer(Peer& peer) {
  core_->check_usable();
  core_->forget_peer(peer);
}

std::vector<PeerRef> Engine::peers() const { return core_->peers(); }

PeerExplanation Engine::explain(Peer& peer) {
  core_->check_usable();
  return core_->explain(peer);
}

PeerGroupRef Engine::add_peer_group(std::span<const Address> addresses) {
  std::vector<PeerRef> peers;
  for (const Address& member : addresses) peers.push_back(peer(member));
  core_->run_as_holder([&] {
    for (const PeerRef& member : peers) core_->start_connect(*member);
  });
  return PeerGroupRef::adopt(new PeerGroup(this, std::move(peers)));
}

// --- operations ---

TransferRef EngineCore::make_transfer(OpKind kind) {
  Transfer* transfer = transfers_.take();
  transfer->work_->kind = kind;
  return TransferRef::adopt(transfer);
}

TransferRef EngineCore::hand_over(TransferRef transfer, bool short_work) {
  Region* const local = transfer->work_->local;
  // The caller's reference, and the engine's until completion. Not published yet: no atomic addition needed.
  transfer->word_.store(2 * Transfer::kOneRef, std::memory_order_relaxed);
  const bool here = short_work && options_.polling != Polling::kSpin && !is_staged() && try_enter(kSubmitting);
  if (!here && local != nullptr) local->begin_op();
  // Between our caller's look and now. From try_enter or begin_op on, close() waits for us; before it, we see it.
  if (local != nullptr && local->closed()) {
    if (here) {
      leave();
    } else {
      local->end_op();
    }
    transfer->word_.store(Transfer::kOneRef, std::memory_order_relaxed);
    transfer->work_->local = nullptr;
    throw UsageError("the region was closed while it was submitted from or to");
  }
  if (here) {
    submit_here(transfer.get());
  } else {
    submit(transfer.get());
  }
  return transfer;
}

TransferRef Engine::submit_write(const WriteRequest& request) {
  core_->check_usable();
  check_local(request.src, "src", request.src ? request.src->engine_.get() : nullptr, this);
  check_remote(request.dst, "dst", Access::kRemoteWrite);
  check_range("src", request.src_offset, request.length_bytes, request.src->length_bytes());
  check_range("dst", request.dst_offset, request.length_bytes, request.dst->length_bytes());
  check_imm(request.imm);
  check_rail(request.rail, rail_count());
  TransferRef transfer = core_->make_transfer(OpKind::kWrite);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.local = request.src;
  work.set_remote(request.dst);
  work.local_offset = request.src_offset;
  work.remote_offset = request.dst_offset;
  work.length_bytes = request.length_bytes;
  work.imm = request.imm;
  work.rail = request.rail;
  work.bulk = request.length_bytes >= kBulkBytes;
  if (request.verify) verify(work);
  return core_->hand_over(std::move(transfer), request.length_bytes <= kShortBytes);
}

TransferRef Engine::submit_read(const ReadRequest& request) {
  core_->check_usable();
  check_local(request.dst, "dst", request.dst ? request.dst->engine_.get() : nullptr, this);
  check_remote(request.src, "src", Access::kRemoteRead);
  check_range("dst", request.dst_offset, request.length_bytes, request.dst->length_bytes());
  check_range("src", request.src_offset, request.length_bytes, request.src->length_bytes());
  check_rail(request.rail, rail_count());
  TransferRef transfer = core_->make_transfer(OpKind::kRead);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.local = request.dst;
  work.set_remote(request.src);
  work.local_offset = request.dst_offset;
  work.remote_offset = request.src_offset;
  work.length_bytes = request.length_bytes;
  work.rail = request.rail;
  work.bulk = request.length_bytes >= kBulkBytes;
  if (request.verify) verify(work);
  return core_->hand_over(std::move(transfer), request.length_bytes <= kShortBytes);
}

TransferRef Engine::submit_paged_writes(const PagedWriteRequest& request) {
  core_->check_usable();
  check_local(request.src, "src", request.src ? request.src->engine_.get() : nullptr, this);
  check_remote(request.dst, "dst", Access::kRemoteWrite);
  if (request.src_pages.count != request.dst_pages.count) {
    throw UsageError("src_pages has " + text(request.src_pages.count) + " indices, dst_pages " +
                     text(request.dst_pages.count) + ": they must be as many");
  }
  check_imm(request.imm);
  check_rail(request.rail, rail_count());
  const std::pair<const char*, uint64_t> sizes[] = {{"page_bytes", request.page_bytes},
                                                    {"src_stride", request.src_stride_bytes},
                                                    {"dst_stride", request.dst_stride_bytes},
                                                    {"src_offset", request.src_offset},
                                                    {"dst_offset", request.dst_offset}};
  for (const auto& [name, value] : sizes) {
    if (value > (uint64_t{1} << 56)) throw UsageError(std::string(name) + " = " + text(value) + " is not in 0..2**56");
  }
  TransferRef transfer = core_->make_transfer(OpKind::kPagedWrites);
  TransferWork& work = EngineCore::work_of(*transfer);
  const uint64_t count = request.src_pages.count;
  if (count > work.page_capacity) {
    const uint64_t capacity = std::max<uint64_t>(256, std::bit_ceil(count));
    work.local_pages.reset(new uint32_t[capacity]);
    work.remote_pages.reset(new uint32_t[capacity]);
    work.page_capacity = capacity;
  }
  if (count > 0) {
    copy_page_indices(request.src_pages, "src_pages", request.src_offset, request.src_stride_bytes, request.page_bytes,
                      request.src->length_bytes(), work.local_pages.get());
    copy_page_indices(request.dst_pages, "dst_pages", request.dst_offset, request.dst_stride_bytes, request.page_bytes,
                      request.dst->length_bytes(), work.remote_pages.get());
  }
  work.local = request.src;
  work.set_remote(request.dst);
  work.local_offset = request.src_offset;
  work.remote_offset = request.dst_offset;
  work.page_count = count;
  work.page_bytes = request.page_bytes;
  work.local_stride_bytes = request.src_stride_bytes;
  work.remote_stride_bytes = request.dst_stride_bytes;
  work.length_bytes = count * request.page_bytes;
  work.imm = request.imm;
  work.rail = request.rail;
  work.bulk = work.length_bytes >= kBulkBytes;
  if (request.verify) verify(work);
  return core_->hand_over(std::move(transfer), work.length_bytes <= kShortBytes && count <= kShortPages);
}

TransferRef Engine::submit_scatter(const ScatterRequest& request) {
  core_->check_usable();
  check_local(request.src, "src", request.src ? request.src->engine_.get() : nullptr, this);
  const size_t count = request.dsts.size();
  if (request.lengths.size() != count || request.src_offsets.size() != count || request.dst_offsets.size() != count) {
    throw UsageError("dsts has " + text(count) + " entries, lengths " + text(request.lengths.size()) +
                     ", src_offsets " + text(request.src_offsets.size()) + ", dst_offsets " +
                     text(request.dst_offsets.size()) + ": they must be as many");
  }
  if (request.group != nullptr) check_group(*request.group, this);
  if (request.group != nullptr && request.group->size() != count) {
    throw UsageError("dsts has " + text(count) + " entries, the group " + text(request.group->size()) +
                     " peers: they must be as many");
  }
  check_imm(request.imm);
  for (size_t i = 0; i < count; ++i) {
    if (request.dsts[i] == nullptr || request.dsts[i]->descriptor().access != Access::kRemoteWrite) {
      check_remote(request.dsts[i], ("dsts[" + text(i) + "]").c_str(), Access::kRemoteWrite);
    }
    check_range("src", request.src_offsets[i], request.lengths[i], request.src->length_bytes());
    check_range("dsts", request.dst_offsets[i], request.lengths[i], request.dsts[i]->length_bytes());
    if (request.group != nullptr && request.group->peers()[i].get() != request.dsts[i]->peer()) {
      throw UsageError("dsts[" + text(i) + "] belongs to '" + request.dsts[i]->peer()->address().name +
                       "', the group's peer there is '" + request.group->peers()[i]->address().name + "'");
    }
  }
  TransferRef transfer = core_->make_transfer(OpKind::kScatter);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.targets.resize(count);
  for (size_t i = 0; i < count; ++i) {
    ScatterTarget& target = work.targets[i];
    target.dst = RemoteRegionRef::share(request.dsts[i]);
    target.peer = request.dsts[i]->peer();
    target.src_offset = request.src_offsets[i];
    target.dst_offset = request.dst_offsets[i];
    target.length_bytes = request.lengths[i];
    target.posted_bytes = 0;
    work.length_bytes += request.lengths[i];
  }
  work.targets_total = count;
  work.local = request.src;
  work.imm = request.imm;
  work.bulk = work.length_bytes >= kBulkBytes;
  if (request.verify) verify(work);
  return core_->hand_over(std::move(transfer), work.length_bytes <= kShortBytes);
}

TransferRef Engine::submit_barrier(PeerGroup& group, uint32_t imm) {
  core_->check_usable();
  check_group(group, this);
  if (imm == kNoImm) throw UsageError("imm is missing: a barrier is nothing but its immediate");
  check_imm(imm);
  TransferRef transfer = core_->make_transfer(OpKind::kBarrier);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.targets.resize(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    work.targets[i].peer = group.peers()[i].get();
    work.targets[i].length_bytes = work.targets[i].posted_bytes = 0;
  }
  work.targets_total = group.size();
  work.group = PeerGroupRef::share(&group);
  work.imm = imm;
  return core_->hand_over(std::move(transfer), true);
}

TransferRef Engine::submit_send(Peer& peer, std::span<const uint8_t> payload) {
  core_->check_usable();
  if (payload.size() > options().message_bytes_max) {
    throw UsageError("message of " + text(payload.size()) +
                     " bytes exceeds message_bytes_max = " + text(options().message_bytes_max) +
                     "; write it instead, or raise the engine's option (at most 262144)");
  }
  TransferRef transfer = core_->make_transfer(OpKind::kSend);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.payload.assign(payload.begin(), payload.end());
  work.receiver = PeerRef::share(&peer);
  work.length_bytes = payload.size();
  return core_->hand_over(std::move(transfer), payload.size() <= kShortBytes);
}

Ref<ReceivePool> Engine::submit_recvs(uint32_t buffer_count, uint32_t buffer_bytes) {
  core_->check_usable();
  if (buffer_count == 0 || buffer_count > (1u << 20))
    throw UsageError("count = " + text(buffer_count) + " is not in 1..2**20");
  if (buffer_bytes == 0 || buffer_bytes > 256 * 1024)
    throw UsageError("nbytes = " + text(buffer_bytes) + " is not in 1..262144");
  auto pool = Ref<ReceivePool>::adopt(new ReceivePool(Ref<Engine>::share(this), buffer_count, buffer_bytes));
  {
    std::lock_guard lock(core_->tables_mutex_);
    if (core_->pool_) throw UsageError("the engine has an open receive pool already: close it first");
    core_->pool_ = pool;
  }
  // release: pairs with the acquire in on_message.
  core_->pool_version_.fetch_add(1, std::memory_order_release);
  core_->wake();  // messages may have been waiting for a pool
  return pool;
}

// --- counting ---

Ref<ImmCounter> Engine::imm_counter(uint32_t imm) {
  core_->check_usable();
  if (imm > kImmMax) throw UsageError("imm = " + text(imm) + " is not in 0..2**28-1");
  Ref<ImmCounter> counter = core_->imms_.find_or_add(Ref<Engine>::share(this), imm);
  if (!counter) {
    throw UsageError("imm_counters_max = " + text(options().imm_counters_max) +
                     " counters exist already: release some, or raise it");
  }
  return counter;
}

Ref<ImmCounter> Engine::alloc_imm() {
  core_->check_usable();
  return core_->imms_.allocate(Ref<Engine>::share(this));
}

void Engine::release_imm(uint32_t imm, bool force) { core_->imms_.release(imm, force); }

Ref<Watcher> Engine::alloc_watcher(Notifier* notifier, uint64_t cookie) {
  core_->check_usable();
  return core_->watchers_->add(core_->watchers_, notifier, cookie);
}

// --- running it ---

bool Engine::progress() {
  core_->check_usable();
  return core_->progress();
}

void Engine::set_event_notifier(Notifier* notifier, uint64_t cookie) {
  std::lock_guard lock(core_->tables_mutex_);
  core_->event_notifier_ = Ref<Notifier>::share(notifier);
  core_->event_cookie_ = cookie;
  if (!core_->events_.empty() && notifier != nullptr) notifier->post(cookie);
}

std::vector<EngineEvent> Engine::take_events() {
  std::lock_guard lock(core_->tables_mutex_);
  return std::exchange(core_->events_, {});
}

uint32_t Engine::seat() const { return core_->seat_.number; }

EngineStats Engine::stats() const { return core_->stats(); }
void Engine::dump(std::string_view reason, TextSink* sink) const { core_->dump(reason, sink); }

}  // namespace crossrail
