#include "engine/engine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <thread>

#include "engine/core.h"
#include "engine/options.h"
#include "engine/wait_until.h"

namespace crossrail {

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

Peer::Peer(std::shared_ptr<const Address> address, Route route, std::shared_ptr<PeerTrack> track)
    : address_(std::move(address)),
      work_(std::make_unique<PeerWork>()),
      route_(std::move(route)),
      posted_(route_.traits->balances_rails ? nullptr : track->rails.get()),
      track_(std::move(track)) {}
Peer::~Peer() = default;

Engine::Engine(const EngineOptions& options) : core_(std::make_unique<EngineCore>(this, options)) {}

Engine::~Engine() {
  if (core_->forked()) {
    core_.release();  // its threads and locks are the parent's
    return;
  }
  core_->close(0);
}

// The last reference may belong to a transfer that a thread of ours completes, as the progress holder, after its user
// has dropped everything. It can neither join itself nor wait for the lock that it holds: another thread destroys the
// engine then.
void Engine::destroy() {
  add_ref();  // not again, when what the worker still does on its own gives back a reference
  if (core_->is_simulated()) {
    const std::shared_ptr<Simulation> simulation = options().simulation;  // outlives us
    simulation->after_turn([this] { delete this; });
  } else if (core_->is_own_thread()) {
    std::thread([this] { delete this; }).detach();
  } else {
    delete this;
  }
}

Ref<Engine> Engine::open(const EngineOptions& options) {
  check_options(options);
  return Ref<Engine>::adopt(new Engine(options));
}

bool Engine::close(Deadline drain_deadline, const InterruptCheck& interrupted) {
  return core_->close(drain_deadline, interrupted);
}
bool Engine::closed() const { return core_->closed() || core_->forked(); }
const EngineOptions& Engine::options() const { return core_->options_; }
const Clock& Engine::clock() const { return core_->clock(); }
const Address& Engine::address() const { return core_->transports_.address(); }
uint32_t Engine::rail_count() const { return core_->transports_.rail_count(); }
std::string Engine::no_gpu_memory() const { return core_->transports_.no_gpu_memory(); }
uint32_t Engine::gpu_transports() const { return core_->transports_.gpu_transports(); }

std::vector<std::pair<TransportKind, std::vector<std::string>>> Engine::rail_devices() const {
  std::vector<std::pair<TransportKind, std::vector<std::string>>> found;
  const TransportSet& transports = core_->transports_;
  for (uint32_t i = 0; i < transports.size(); ++i) {
    if (!transports.rail_devices(i).empty()) found.emplace_back(transports.kind_at(i), transports.rail_devices(i));
  }
  return found;
}

// --- memory ---

// Otherwise whoever moves the bytes would die of SIGSEGV. MS_ASYNC writes nothing: the kernel only looks for gaps.
static void check_mapped(void* base, uint64_t length_bytes) {
  const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uint64_t>(base);
  const uint64_t first = address / page_bytes * page_bytes;
  uint64_t end = 0;
  const bool wraps = __builtin_add_overflow(address, length_bytes, &end);
  if (!wraps && msync(reinterpret_cast<void*>(first), end - first, MS_ASYNC) == 0) return;  // NOLINT(*-int-to-ptr)
  if (!wraps && errno != ENOMEM) return;  // says nothing about the memory
  throw UsageError("of the " + text(length_bytes) + " bytes at address " + text(address) +
                   " some are not mapped in this process: is it the address of another one, or memory that was freed?");
}

RegionRef Engine::register_memory(void* base, uint64_t length_bytes, Access access, MemoryKind memory) {
  core_->check_usable();
  if (base == nullptr) throw UsageError("the buffer's address is null");
  if (length_bytes == 0) throw UsageError("the buffer is empty: a region has at least one byte");
  if (length_bytes > (uint64_t{1} << 48))
    throw UsageError("the buffer's length " + text(length_bytes) + " exceeds 2**48");
  const bool is_touched = core_->transports_.address().transports != transport_bit(TransportKind::kNull);
  if (memory == MemoryKind::kHost && base != kPhantomBase && is_touched) check_mapped(base, length_bytes);
  auto local = core_->transports_.register_memory(static_cast<std::byte*>(base), length_bytes, access, memory);
  return RegionRef::adopt(new Region(Ref<Engine>::share(this), std::move(local), access));
}

static void check_length(uint64_t length_bytes) {
  if (length_bytes == 0) throw UsageError("nbytes = 0: a region has at least one byte");
  if (length_bytes > (uint64_t{1} << 48)) throw UsageError("nbytes = " + text(length_bytes) + " exceeds 2**48");
}

RegionRef Engine::alloc(uint64_t length_bytes, bool populate) {
  core_->check_usable();
  check_length(length_bytes);
  auto local = core_->transports_.allocate(length_bytes, populate);
  return RegionRef::adopt(new Region(Ref<Engine>::share(this), std::move(local), Access::kRemoteWrite));
}

RegionRef Engine::alloc_for_mapping(uint64_t length_bytes) {
  core_->check_usable();
  check_length(length_bytes);
  auto local = core_->transports_.allocate(length_bytes, false, true);
  return RegionRef::adopt(new Region(Ref<Engine>::share(this), std::move(local), Access::kRemoteWrite));
}

RegionRef Engine::alloc_on_gpu(uint64_t length_bytes, int gpu) {
  core_->check_usable();
  check_length(length_bytes);
  core_->transports_.check_moves_gpu_memory();
  const auto memory = device::MappedMemory::map(device::PhysicalMemory::create(gpu, length_bytes), gpu);
  memory->open_to_neighbours();
  memory->clear();
  memory->give_to_kernels(gpu);  // to kernels of the user, who has the address
  auto local =
      core_->transports_.register_memory(memory->base(), length_bytes, Access::kRemoteWrite, MemoryKind::kCuda);
  return RegionRef::adopt(new Region(Ref<Engine>::share(this), std::move(local), Access::kRemoteWrite, memory));
}

RegionRef Engine::register_phantom(uint64_t length_bytes) {
  core_->check_usable();
  if (options().simulation == nullptr) {
    throw UsageError("register_phantom is for simulated engines: this one, with transport " +
                     transport_names(address().transports) + ", moves real bytes and needs real memory");
  }
  return register_memory(kPhantomBase, length_bytes, Access::kRemoteWrite);
}

RemoteRegionRef Engine::remote_region(const RegionDescriptor& descriptor) {
  core_->check_usable();
  return core_->peer_table().region(peer(descriptor.owner), descriptor);
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
  const WaitResult result = core_->wait_until(settled, nap, deadline, interrupted);
  if (result != WaitResult::kReady) return result;
  return peer.state() == PeerState::kLost ? WaitResult::kClosed : WaitResult::kReady;
}

// Here, and not on the progress holder: the driver takes its time.
static void map_physical(int gpu, Mapping* mapping) {
  const std::shared_ptr<device::MappedMemory> memory = device::MappedMemory::map(mapping->physical, gpu);
  memory->give_to_kernels(gpu);
  mapping->base = memory->base() + mapping->offset;
  mapping->memory = memory;
  mapping->physical.reset();
}

WaitResult Engine::map(RemoteRegion& region, int gpu, Deadline deadline, const InterruptCheck& interrupted,
                       Mapping* mapping, Status* status) {
  static constexpr int64_t kLookEveryNs = 200'000;
  if (gpu >= 0) device::check_gpu(gpu, "map");
  Peer& peer = *region.peer();
  const WaitResult connected = connect(peer, deadline, interrupted);
  *status = Status::kPeerLost;
  if (connected != WaitResult::kReady)
    return connected == WaitResult::kClosed && !closed() ? WaitResult::kReady : connected;
  while (true) {
    core_->run_as_holder([&] { *status = core_->map(peer, region, gpu, mapping); });
    if (*status == Status::kDone && mapping->physical != nullptr) map_physical(gpu, mapping);
    if (*status != Status::kPending) return closed() ? WaitResult::kClosed : WaitResult::kReady;
    // The peer is asked once per region and incarnation: an occasional look is cheap enough.
    const Deadline next_look = std::min(deadline, clock().now_ns() + kLookEveryNs);
    const WaitResult waited = core_->wait_until([] { return false; }, nap, next_look, interrupted);
    if (waited != WaitResult::kTimeout || clock().now_ns() >= deadline) return waited;
  }
}

void Engine::forget_peer(Peer& peer) {
  core_->check_usable();
  core_->forget_peer(peer);
}

std::vector<PeerRef> Engine::peers() const { return core_->peer_table().peers(); }

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

// --- counting ---

Ref<ImmCounter> Engine::imm_counter(uint32_t imm) {
  core_->check_usable();
  if (imm > kImmMax) throw UsageError("imm = " + text(imm) + " is not in 0..2**28-1");
  Ref<ImmCounter> counter = core_->imms_.find_or_add(this, imm);
  if (!counter) core_->imms_.throw_full();
  return counter;
}

Ref<ImmCounter> Engine::alloc_imm() {
  core_->check_usable();
  return core_->imms_.allocate(this);
}

void Engine::release_imm(uint32_t imm, bool force) { core_->imms_.release(imm, force); }

Ref<Watcher> Engine::alloc_watcher(Notifier* notifier, uint64_t cookie) {
  core_->check_usable();
  if (core_->options_.simulation) core_->options_.simulation->watches_words(core_->seat_.number);
  return core_->watchers_->add(EngineRef::share(this), core_->watchers_, notifier, cookie);
}

// --- running it ---

bool Engine::progress() {
  core_->check_usable();
  return core_->progress();
}

void Engine::set_event_notifier(Notifier* notifier, uint64_t cookie) { core_->events_.set_notifier(notifier, cookie); }

std::vector<EngineEvent> Engine::take_events() { return core_->events_.take(); }

uint32_t Engine::seat() const { return core_->seat_.number; }

EngineStats Engine::stats() const { return core_->stats(); }

TrafficReport Engine::traffic(int64_t patience_ns) {
  core_->check_usable();
  return core_->traffic(patience_ns);
}

void Engine::dump(std::string_view reason, TextSink* sink) const { core_->dump(reason, sink); }

}  // namespace crossrail
