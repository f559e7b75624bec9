// The engine: every operation of the contract, over whatever transport carries it.
//
// Contract: reliable and unordered. No two operations are ordered, not even on one rail; all synchronisation is
// counting of immediates at the receiver. Every accepted submit completes exactly once. The interface follows the
// paper's TransferEngine (arXiv 2510.27656, figure 2) in spirit; counting, cancel and peer life are our own.
//
// Threads: everything here may be called from any thread, except inside InterruptCheck. Nothing calls back into the
// user: completions are posted to Notifiers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/heartbeats.h"
#include "engine/imm_counter.h"
#include "engine/notifier.h"
#include "engine/page_indices.h"
#include "engine/recv_pool.h"
#include "engine/region.h"
#include "engine/traffic.h"
#include "engine/transfer.h"
#include "engine/transports.h"
#include "engine/watcher.h"
#include "transport/descriptor.h"
#include "transport/types.h"
#include "util/errors.h"

namespace crossrail {

class EngineCore;  // worker side, in engine/core.h
struct PeerWork;   // what is queued for a peer, in engine/peer_work.h
struct PeerTrack;  // what the flight recorder knows about a peer, in engine/flight_recorder.h
class TextSink;

enum class Polling : uint8_t {
  kAdaptive,  // the worker spins briefly, then sleeps; a thread that waits drives the engine itself meanwhile
  kSpin,      // the worker never sleeps: for a dedicated core
  kManual     // no worker thread: the caller's submit, wait and progress() drive the engine
};

struct EngineOptions {
  std::string name;  // 1..64 bytes
  // Each at most once. The transport is chosen per peer: see choose_transport in engine/routes.h.
  std::vector<TransportKind> transports = {TransportKind::kShm};
  // Adds verbs, or else ofi over EFA, if this machine has a device for it. If such a device cannot be opened, that is
  // an event; a machine without one is not.
  bool adds_rdma = false;
  uint32_t rail_count = 1;  // 1..kRailsMax, for each of tcp, verbs and ofi in use; shm has one when any of these is
  // What rails are bound to: an IP address, an interface, or for verbs and ofi also a device or port ("mlx5_0:1").
  // Empty: the default. With adds_rdma, each transport takes the names that it understands (engine/rail_names.h).
  std::vector<std::string> rails;
  uint16_t port = 0;                         // tcp: the port to listen on; 0: any
  std::string secret;                        // tcp, verbs, ofi: peers must have the same one
  TlsOptions tls;                            // tcp, which is then the only transport to other hosts
  int64_t peer_timeout_ns = 10'000'000'000;  // tcp, verbs, ofi: a peer that is silent for so long is lost
  RdmaOptions rdma;
  Polling polling = Polling::kAdaptive;
  int64_t spin_ns = 50'000;                    // how long an idle worker or waiter spins before it sleeps
  int32_t worker_cpu = -1;                     // core to pin the worker to, or -1
  uint32_t submit_queue_depth = 4096;          // power of two, 16..65536: submits not yet taken over by the worker
  uint32_t imm_counters_max = 65536;           // distinct immediate numbers kept at once
  uint32_t message_bytes_max = 64 * 1024;      // longest submit_send, at most 256 KiB
  int64_t watcher_poll_ns = 5'000;             // pause between looks at watched words; 0 spins
  int64_t connect_timeout_ns = 5'000'000'000;  // a peer that has not answered the handshake by then is lost
  int64_t heartbeat_ns = 0;                    // how often connected peers are asked for a sign of life; 0: never
  PrivatePath private_path = PrivatePath::kAuto;
  uint32_t recorder_entries = 1024;     // per ring of the flight recorder: 0: off, or a power of two 64..2^20
  int64_t watchdog_ns = 0;              // report whatever waits without moving for this long (kStalled); 0: off
  bool counts_traffic = true;           // per peer and rail: Engine::traffic
  std::string dump_directory = "/tmp";  // where the flight recorder goes upon a signal, a failed assertion, or a stall
  // sim, and only with it: the world, and the number of the host in it. The engine then has no threads: whoever waits
  // drives the world.
  std::shared_ptr<Simulation> simulation;
  uint32_t simulated_host = 0;
};

// Something that happened outside of any transfer.
struct EngineEvent {
  enum class Kind : uint8_t {
    kImmOverflow,  // arrivals of more distinct immediates than imm_counters_max were dropped: the job is broken
    kPeerConnected,
    kPeerLost,
    kPeerLeft,          // likewise, by closing its engine
    kPeerSlow,          // with heartbeats: it has not answered one within an interval
    kPeerFrozen,        // has made no progress while something waits for it; may recover
    kPeerThawed,        // was slow or frozen and answers again
    kChecksumMismatch,  // our memory does not match what a peer's checked write sent; it was not counted
    kStalled,           // nothing has moved for watchdog_ns while something waited; the detail names the recording
    kTransportAbsent,   // the device is there but its transport did not open; peers are reached by a slower one
    kProtocolError      // malformed bytes from a peer; it was cut off
  };
  Kind kind;
  std::string peer;
  std::string detail;
};

const char* event_kind_name(EngineEvent::Kind kind);

enum class PeerState : uint8_t { kUnknown, kConnecting, kConnected, kSlow, kFrozen, kLost };
const char* peer_state_name(PeerState state);
// Connected, whether or not it moves.
constexpr bool is_linked(PeerState state) {
  return state == PeerState::kConnected || state == PeerState::kSlow || state == PeerState::kFrozen;
}

// An engine we can reach: one per incarnation. Made by Engine::peer.
class Peer : public RefCounted<Peer> {
 public:
  const Address& address() const { return *address_; }
  const std::shared_ptr<const Address>& shared_address() const { return address_; }
  PeerState state() const { return state_.load(std::memory_order_acquire); }
  TransportKind transport_kind() const { return route_.kind; }
  bool takes_gpu_memory() const { return route_.traits->moves_gpu_memory || route_.traits->copies_gpu_memory; }
  const std::string& no_gpu_memory() const { return route_.traits->no_gpu_memory; }

 private:
  friend class Engine;
  friend class EngineCore;
  friend class PeerTable;
  friend class RefCounted<Peer>;
  Peer(std::shared_ptr<const Address> address, Route route, std::shared_ptr<PeerTrack> track);
  ~Peer();
  const std::shared_ptr<const Address> address_;
  std::atomic<PeerState> state_{PeerState::kUnknown};
  // Progress holder only:
  Link* link_ = nullptr;
  std::unique_ptr<PeerWork> work_;
  const Route route_;  // next to link_: posting reads both, in one cache line
  // By rail, if the engine chooses the rails of this transport. Null: the transport reports on_sent, or traffic is not
  // counted.
  RailTraffic* const posted_;
  const std::shared_ptr<PeerTrack> track_;
};
using PeerRef = Ref<Peer>;

// Peers resolved in advance, for scatter and barrier. Immutable, in the caller's order.
class PeerGroup : public RefCounted<PeerGroup> {
 public:
  size_t size() const { return peers_.size(); }
  const std::vector<PeerRef>& peers() const { return peers_; }
  const Engine* engine() const { return engine_; }

 private:
  friend class Engine;
  PeerGroup(const Engine* engine, std::vector<PeerRef> peers) : engine_(engine), peers_(std::move(peers)) {}
  const Engine* const engine_;  // to compare, not to use
  std::vector<PeerRef> peers_;
};
using PeerGroupRef = Ref<PeerGroup>;

// Makes a submit begin later: once the word of `watcher` has reached or passed `threshold`, modulo 2**64. The request
// is checked and accepted now; the engine begins it on its own, on whichever of its threads sees the word first. Until
// then it moves nothing. It can end before it begins: it is cancelled (closing the word does that, too), its peer is
// lost, or its region or engine is closed; those closes wait for it as for any other transfer. The source may be
// written until the word changes: the transfer reads it after that change (release, or a GPU's system-wide fence).
struct Trigger {
  Watcher* watcher = nullptr;  // of the same engine; null: begins at once
  uint64_t threshold = 0;
};

// Contiguous range, `length_bytes` from src.base + src_offset to dst.base + dst_offset. Counts 1 if it carries an
// immediate; if cancelled, it counts nothing (Transfer::cancel). Zero length is allowed: only the immediate travels.
struct WriteRequest {
  Region* src = nullptr;
  uint64_t src_offset = 0;
  RemoteRegion* dst = nullptr;
  uint64_t dst_offset = 0;
  uint64_t length_bytes = 0;
  uint32_t imm = kNoImm;
  uint32_t rail = kAnyRail;  // kAnyRail: split over all rails when long enough
  // Computes a checksum of src at submit. The target's engine compares it with that of its memory before it counts
  // (engine/verification.h).
  bool verify = false;
  Trigger trigger = {};  // not with verify
};

// Contiguous range pulled from src to dst.
struct ReadRequest {
  Region* dst = nullptr;
  uint64_t dst_offset = 0;
  RemoteRegion* src = nullptr;
  uint64_t src_offset = 0;
  uint64_t length_bytes = 0;
  uint32_t rail = kAnyRail;
  bool verify = false;  // checks that what arrived matches the peer's memory, which must not change meanwhile
};

// Page i goes from src.base + src_offset + src_stride_bytes * src_pages[i] to the corresponding place at dst. Index
// arrays are copied at submit. Counts page_count. Target pages may overlap: which write lands last is then undefined.
struct PagedWriteRequest {
  Region* src = nullptr;
  uint64_t src_offset = 0;
  uint64_t src_stride_bytes = 0;
  PageIndices src_pages;
  RemoteRegion* dst = nullptr;
  uint64_t dst_offset = 0;
  uint64_t dst_stride_bytes = 0;
  PageIndices dst_pages;
  uint64_t page_bytes = 0;
  uint32_t imm = kNoImm;
  uint32_t rail = kAnyRail;
  bool verify = false;  // as in WriteRequest; pages must not overlap at the target
  Trigger trigger = {};
};

// Slice i: lengths[i] bytes from src + src_offsets[i] to dsts[i] + dst_offsets[i]. Each target gets 1 count of `imm`,
// or, if `imms` is given (one per target), of imms[i] (kNoImm: no count). Arrays are copied at submit. With a group,
// dsts[i] must belong to the group's i-th peer.
struct ScatterRequest {
  Region* src = nullptr;
  std::span<RemoteRegion* const> dsts;
  std::span<const uint64_t> src_offsets;
  std::span<const uint64_t> dst_offsets;
  std::span<const uint64_t> lengths;
  PeerGroup* group = nullptr;
  uint32_t imm = kNoImm;
  std::span<const uint32_t> imms = {};  // empty: `imm` for all
  bool verify = false;                  // as in WriteRequest, separately for each target
};

// What engine.explain shows.
struct RailExplanation {
  uint32_t rail;
  uint32_t peer_rail;
  std::string endpoint;       // "10.0.0.1:4711", empty where there is none
  std::string peer_endpoint;  // likewise
};
struct PathExplanation {
  std::string what;  // "region 3 (1.0 GiB)" or "private memory"
  std::string path;  // "mapped", "local", "staged", "cross-memory-attach", "unresolved"
  std::string reason;
  double gb_per_s;  // measured; 0 until kRateBytesMin were moved
  uint64_t bytes;   // moved this way so far
};
struct PeerExplanation {
  std::string peer;
  std::string transport;
  std::string reason;  // why this transport
  PeerState state;
  std::string note;  // why lost or frozen; may be empty
  std::vector<RailExplanation> rails;
  double gb_per_s_expected;  // all rails together, from the speeds of their interfaces or ports; 0: unknown
  std::vector<PathExplanation> paths;
  Heartbeat heartbeat;  // answered == 0: there was no heartbeat yet
};

// What engine.traffic shows. Rails hold sums over all peers, including peers that are gone; lost peers are not listed.
struct RailTrafficReport {
  const char* transport;
  uint32_t rail;
  RailCounts counts;
  uint64_t depth = 0;  // works in flight on it; see TrafficReport::is_whole
  uint32_t down = 0;   // paths from it to peers' rails that are down; likewise
};
struct PeerTrafficReport {
  std::string peer;
  const char* transport;
  PeerState state;
  RailCounts counts;                   // over all rails
  uint64_t outstanding = 0;            // works that the transport has
  uint64_t queued = 0;                 // operations not handed to the transport yet
  uint64_t refused = 0, failed = 0;    // from PeerTrack
  std::vector<PathExplanation> paths;  // the paths that bytes take
};
struct TrafficReport {
  // False: the driving thread did not let us in for every peer, so some depths and paths are missing.
  bool is_whole = true;
  bool hangs = false;  // it never let us in, and made no round meanwhile
  std::vector<RailTrafficReport> rails;
  std::vector<PeerTrafficReport> peers;
};

struct EngineStats {
  uint64_t transfers_submitted, transfers_done, transfers_failed, transfers_cancelled;
  uint64_t bytes_written, bytes_read, messages_sent, messages_received;
  uint64_t imm_units_received, imm_overflow_units, work_requests_posted, work_requests_retried;
  uint64_t worker_rounds, worker_sleeps, peers_connected, peers_lost, regions_open, transfers_inflight;

  // Calls visit(name, value) for each, in the order in which people see them.
  template <typename Visit>
  void each(Visit&& visit) const {
    visit("transfers_submitted", transfers_submitted);
    visit("transfers_done", transfers_done);
    visit("transfers_failed", transfers_failed);
    visit("transfers_cancelled", transfers_cancelled);
    visit("transfers_inflight", transfers_inflight);
    visit("bytes_written", bytes_written);
    visit("bytes_read", bytes_read);
    visit("messages_sent", messages_sent);
    visit("messages_received", messages_received);
    visit("imm_units_received", imm_units_received);
    visit("imm_overflow_units", imm_overflow_units);
    visit("work_requests_posted", work_requests_posted);
    visit("work_requests_retried", work_requests_retried);
    visit("worker_rounds", worker_rounds);
    visit("worker_sleeps", worker_sleeps);
    visit("peers_connected", peers_connected);
    visit("peers_lost", peers_lost);
    visit("regions_open", regions_open);
  }
};

class Engine : public RefCounted<Engine> {
 public:
  static Ref<Engine> open(const EngineOptions& options);
  // Completes every transfer, wakes every waiter, tells peers, joins threads. Transfers that still run after
  // `drain_deadline`, or when the interrupt check says stop, complete as kEngineClosed; returns false in the latter
  // case. Idempotent. Concurrent calls each wait until their own deadline, and the first deadline that passes ends the
  // transfers.
  bool close(Deadline drain_deadline = 0, const InterruptCheck& interrupted = {});
  bool closed() const;

  const EngineOptions& options() const;
  const Clock& clock() const;  // the clock of its deadlines
  const Address& address() const;
  uint32_t rail_count() const;        // of the transport with the most
  uint32_t gpu_transports() const;    // mask of the transports that move GPU memory
  std::string no_gpu_memory() const;  // why NICs that could move it do not; empty: no such NIC, or unknown
  // For each transport whose rails are bound to devices: the netdev or port of each rail. Several rails may share one.
  std::vector<std::pair<TransportKind, std::vector<std::string>>> rail_devices() const;

  // --- memory ---
  // kCuda: base is from cudaMalloc or torch. Throws TransportError if no transport of this engine moves such memory, or
  // the NIC refuses it.
  RegionRef register_memory(void* base, uint64_t length_bytes, Access access, MemoryKind memory = MemoryKind::kHost);
  // Zeroed, page-aligned memory that peers on this host map: the fast target and source. populate: fault it in now.
  RegionRef alloc(uint64_t length_bytes, bool populate);
  // Like alloc(), but only for mapping: transfers cannot use it, and no NIC registers it, which would pin its pages.
  // (Only an engine with nothing but NICs registers it.)
  RegionRef alloc_for_mapping(uint64_t length_bytes);
  // Like alloc(), in the memory of that GPU: peers' GPUs map it (device/vmm.h). Waits until it is zeroed, but not for
  // any kernel of the user's. Throws UsageError if there is no such GPU, TransportError if its driver, or every
  // transport, refuses such memory.
  RegionRef alloc_on_gpu(uint64_t length_bytes, int gpu);
  // sim only: a region of any length without memory. Transfers with it are counted and take their simulated time, but
  // move no bytes.
  RegionRef register_phantom(uint64_t length_bytes);
  // Cached: the same descriptor gives the same object. Does not connect.
  RemoteRegionRef remote_region(const RegionDescriptor& descriptor);

  // --- peers ---
  PeerRef peer(const Address& address);  // starts connecting at first use
  WaitResult connect(Peer& peer, Deadline deadline, const InterruptCheck& interrupted);  // kClosed: the peer is lost
  // Ends every transfer to this peer as kPeerLost and drops all state about it. The same address can be connected again
  // later.
  void forget_peer(Peer& peer);
  // Maps a peer's memory into this process: memory of its alloc(), on this host. `status`: kDone, or why not, as
  // Transport::map and the peer report it; meaningless unless the result is kReady. Connects. Accesses through the
  // mapping are outside the contract: they are not counted, and close() or revoke() of the region does not stop them;
  // the memory lives as long as the mapping. gpu: the local GPU for whose kernels GPU memory is mapped (alloc_on_gpu(),
  // or other physical memory); -1: host memory. Throws UsageError if there is no such GPU, TransportError if it cannot
  // reach the memory.
  WaitResult map(RemoteRegion& region, int gpu, Deadline deadline, const InterruptCheck& interrupted, Mapping* mapping,
                 Status* status);
  std::vector<PeerRef> peers() const;
  PeerExplanation explain(Peer& peer);
  PeerGroupRef add_peer_group(std::span<const Address> addresses);

  // --- operations; all throw UsageError for what can be checked now, and block only while the queue is full ---
  TransferRef submit_write(const WriteRequest& request);
  TransferRef submit_read(const ReadRequest& request);
  TransferRef submit_paged_writes(const PagedWriteRequest& request);
  TransferRef submit_scatter(const ScatterRequest& request);
  TransferRef submit_barrier(PeerGroup& group, uint32_t imm);
  TransferRef submit_send(Peer& peer, std::span<const uint8_t> payload);  // payload copied
  // One pool receives at a time; throws UsageError while another is open.
  Ref<ReceivePool> submit_recvs(uint32_t buffer_count, uint32_t buffer_bytes);

  // --- counting ---
  // The counter for this number; the engine keeps it until release_imm.
  Ref<ImmCounter> imm_counter(uint32_t imm);
  // An unused number from the upper half of the number space, with its counter. Never a number that is handed out and
  // not released, that has a counter, or for which anything has arrived since its release.
  Ref<ImmCounter> alloc_imm();
  // The caller states that no peer will send this number any more. Drops the counter; alloc_imm hands the number out
  // again after all others. Throws UsageError while somebody waits for it or part of a count has arrived; force drops
  // the counter even then.
  void release_imm(uint32_t imm, bool force = false);
  Ref<Watcher> alloc_watcher(Notifier* notifier, uint64_t cookie);

  // --- running it ---
  // One round: takes submits, posts, polls. True if anything moved. Needed only with Polling::kManual.
  bool progress();
  void set_event_notifier(Notifier* notifier, uint64_t cookie);
  std::vector<EngineEvent> take_events();
  EngineStats stats() const;
  // Asks the progress holder once per peer, waiting up to patience_ns each time, on the real clock. Stops asking after
  // the first attempt that fails, and after 3 s or patience_ns in all, whichever is longer.
  TrafficReport traffic(int64_t patience_ns);
  // Writes the contents of the flight recorder, and what waits for what, in the format of engine/flight_dump.h. Also
  // works on a closed engine.
  void dump(std::string_view reason, TextSink* sink) const;

  uint32_t seat() const;  // sim: its number in the world

  // For the engine's internals.
  EngineCore& core() { return *core_; }

 private:
  friend class RefCounted<Engine>;
  friend class EngineCore;
  friend class TransferPool;
  friend class Transfer;
  friend class ImmCounter;
  friend class ReceivePool;
  friend class Region;
  explicit Engine(const EngineOptions& options);
  ~Engine();
  void destroy();  // shadows RefCounted's
  std::unique_ptr<EngineCore> core_;
};

using EngineRef = Ref<Engine>;

}  // namespace crossrail
