// The contract between the engine and whatever carries its bytes. One instance serves one engine.
//
// Threads: calls marked [any] may come from any thread at any time between open and close. All others come from the
// progress holder: one thread at a time, ordered by the engine's progress lock.
//
// A transport promises: it retires every accepted work request exactly once, by post(), Sink::on_retired or
// Sink::on_withdrawn. Once one is retired, this side touches neither its source nor its target any more. If its status
// is kDone, the peer has all of it and will count its immediate. An immediate is counted after its bytes are in place.
// It promises no order, unless Traits::fifo_rails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "device/vmm.h"
#include "transport/descriptor.h"
#include "transport/simulation.h"
#include "transport/types.h"
#include "util/clock.h"

namespace crossrail {

// How a link ends.
enum class LinkEnd : uint8_t {
  kLost,
  kLeft,   // the peer's engine was closed, not killed
  kUnmade  // it never came up: this process or the peer lacked descriptors or memory; connect() may be tried again
};

// One engine that we send to. Owned by the transport, from connect() until Sink::on_link_down or disconnect().
class Link {
 public:
  virtual ~Link() = default;
  // How many pairs of rails the link spreads over, including those that are down. Constant after on_link_up. The engine
  // asks only if Traits::balances_rails, and does not cut a write for a link with one pair.
  virtual uint32_t lanes() const { return 1; }
  void* user = nullptr;  // the engine's Peer
};

// The transport's half of a local region. Destroyed after close_region said yes.
class LocalRegion {
 public:
  virtual ~LocalRegion() = default;
  std::byte* base = nullptr;
  uint64_t length_bytes = 0;
  uint64_t id = 0;         // assigned by the engine at registration
  bool is_mapped = false;  // peers of this host can map it
  bool maps_file = false;  // may be a mapped file, which can be truncated; set only if the transport cares
  int gpu = -1;            // the GPU that the memory belongs to; -1: host memory
  // The keys that an RDMA transport puts into the region's descriptor. They stay the same for the region's life.
  virtual RdmaKeys rdma_keys() const { return {}; }
  // How the NICs got access to GPU memory, for people ("dma-buf").
  virtual std::string given_by() const { return {}; }
};

// The transport's half of a peer's region. Owned by the engine; dies before the link does.
class RemoteKey {
 public:
  virtual ~RemoteKey() = default;
};

// kService carries at most kServiceBytesMax to the peer's engine (Sink::on_service). The payload stays in place until
// the request is retired; kDone means that the peer's engine has it. It is never held up by receive pools or messages.
enum class WorkOp : uint8_t { kWrite, kRead, kSend, kService };
inline constexpr uint64_t kMessageBytesMax = 256 << 10;  // for kSend, whatever limit an engine is configured with
inline constexpr uint64_t kServiceBytesMax = 4000;       // one fragment of the rdma protocol
// A one-sided operation of a single work request up to this size does not wait behind long ones: the engine queues it
// separately, and tcp has separate connections for it.
inline constexpr uint64_t kShortBytesMax = (16 << 10) - 1;
inline constexpr uint32_t kServicesQueuedMax = 64;  // post() accepts no more than this per link until some retire

// A peer's memory, mapped here. It stays readable and writable while `memory` is held, even if the peer or its region
// is gone.
struct Mapping {
  std::shared_ptr<const void> memory;
  std::byte* base = nullptr;
  uint64_t length_bytes = 0;  // of the region, as its owner says
  // GPU memory comes in this form instead: the caller maps it, and the region begins at `offset`.
  std::shared_ptr<const device::PhysicalMemory> physical;
  uint64_t offset = 0;
  std::string trouble;  // for kAccessDenied and kTransportFailed; may be empty
};

// One piece of work for one rail. 64 bytes: a cache line per piece.
struct WorkRequest {
  WorkOp op = WorkOp::kWrite;
  bool has_imm = false;   // writes only
  bool bulk = false;      // part of a transfer much larger than the caches
  uint32_t wire_imm = 0;  // share code and number (transport/wire_imm.h)
  std::byte* local = nullptr;
  uint64_t length_bytes = 0;
  RemoteKey* remote = nullptr;  // null for kSend, kService, and for an immediate without bytes that concerns no region
  uint64_t remote_offset = 0;
  LocalRegion* local_region = nullptr;  // null for kSend, kService
  void* context = nullptr;              // returned when the request is retired
  uint32_t tag = 0;                     // returned likewise; requests with the same context may have different tags
  uint32_t reserved = 0;                // for the engine's own use
};
static_assert(sizeof(WorkRequest) == 64);
// The GPU whose memory the request's local side is in; -1: host memory.
inline int gpu_of(const WorkRequest& request) {
  return request.local_region == nullptr ? -1 : request.local_region->gpu;
}

struct Traits {
  uint32_t rail_count = 1;
  uint64_t slice_bytes_max = 0;  // the engine cuts longer writes, so that short ones can go between the slices
  uint64_t message_bytes_max = 0;
  bool fifo_rails = false;  // on one rail of one link, a write's bytes and immediate land no earlier than those of
                            // the writes posted before it
  // The transport spreads requests with kAnyRail over its rails. The engine names a rail only if the user did.
  bool balances_rails = false;
  bool moves_while_posting = true;      // a post takes as long as its bytes; else it only queues them
  uint64_t piece_bytes_min = 16 << 10;  // a shorter piece is not worth another rail's overhead
  bool moves_gpu_memory = false;        // NICs access GPU memory directly
  std::string no_gpu_memory{};          // why not, if the NICs could in principle; empty: no reason known
  bool copies_gpu_memory = false;       // the CPU on this side has the driver copy GPU memory
};

// A transport calls these from inside post() and poll(), on the progress holder.
class Sink {
 public:
  // The transport has let go of `count` work requests with this context and tag, `bytes` in all. detail may be empty.
  virtual void on_retired(Link& link, void* context, uint32_t tag, uint32_t count, uint64_t bytes, Status status,
                          const std::string& detail) = 0;
  // One work request was taken back (withdraw), which retires it. Its immediate will never be counted. Some of its
  // bytes may be in place. If several requests with the same context and tag end together, one call may report the sum
  // of their `bytes` and the others 0.
  virtual void on_withdrawn(Link& link, void* context, uint32_t tag, uint64_t bytes) = 0;
  // Immediates arrived: `units` 48ths of the number `imm`.
  virtual void on_imm(uint32_t imm, uint64_t units) = 0;
  enum class Offer : uint8_t { kTaken, kHold, kTooLong };
  // A message arrived. kHold: keep it and offer it again at the next poll.
  virtual Offer on_message(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) = 0;
  // A kService payload arrived: untrusted, 0..kServiceBytesMax bytes. Called once per payload, in any order. The sink
  // queues it.
  virtual void on_service(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) = 0;
  virtual void on_link_up(Link& link) = 0;
  // The peer is gone: post no more. The transport next retires everything posted on the link, then deletes the link. It
  // has already reported (on_imm) everything that the peer was told is done.
  virtual void on_link_down(Link& link, const std::string& reason, LinkEnd end) = 0;
  virtual void on_link_frozen(Link& link, bool frozen, const std::string& detail) = 0;
  virtual void on_protocol_error(const std::string& peer, const std::string& detail) = 0;
  // [any] The status for peers that name a region that is not open: kRegionRevoked, or kRegionClosed for closed and
  // unknown regions.
  virtual Status status_of_gone(uint64_t /*region_id*/) { return Status::kRegionClosed; }
  // For the flight recorder, if Traits::balances_rails. on_sent: the transport put `count` works of this context on
  // `rail`, `bytes` in all, `imms` of them with an immediate. on_over: they ended there; on_retired follows.
  virtual void on_sent(Link& /*link*/, uint32_t /*rail*/, void* /*context*/, uint32_t /*count*/, uint64_t /*bytes*/,
                       uint32_t /*imms*/) {}
  virtual void on_over(Link& /*link*/, uint32_t /*rail*/, void* /*context*/, uint32_t /*count*/, uint64_t /*bytes*/) {}
  // A connection or path of this rail broke while it carried works.
  virtual void on_rail_broken(Link& /*link*/, uint32_t /*rail*/) {}
  // `count` works that it carried are being sent again, on some rail.
  virtual void on_sent_again(Link& /*link*/, uint32_t /*rail*/, uint32_t /*count*/) {}

 protected:
  ~Sink() = default;
};

// Fewer bytes tell how long a connection, the first touch of pages and an answer take, rather than how fast a path is.
inline constexpr uint64_t kRateBytesMin = uint64_t{16} << 20;
// What a path is said to move. 0: not known yet.
inline double rate_gb_per_s(uint64_t bytes, int64_t busy_ns) {
  return bytes >= kRateBytesMin && busy_ns > 0 ? static_cast<double>(bytes) / static_cast<double>(busy_ns) : 0;
}

struct PathReport {
  std::string what;
  std::string path;
  std::string reason;
  double gb_per_s = 0;  // 0: less than kRateBytesMin was moved, or none of it timed
  uint64_t bytes = 0;
  std::optional<uint32_t> down_rail;  // our rail of the path, while that rail is down
};

// Which of our rails talks to which of the peer's.
struct RailReport {
  uint32_t rail;
  uint32_t peer_rail;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const Traits& traits() const = 0;    // [any]
  virtual const Address& address() const = 0;  // [any]
  // Asked after it has opened: what each rail is bound to, a netdev or a NIC port; several may share one. Empty:
  // nothing.
  virtual std::vector<std::string> rail_devices() const { return {}; }
  // Called once, after all transports of the engine are open and before any other call, with the complete address that
  // peers see. The transport opened last knows it already.
  virtual void complete_address(const Address&) {}

  // --- memory [any]. id: never used before in this incarnation; its slot (region_slot) is no other open region's ---
  virtual std::unique_ptr<LocalRegion> register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                                       Access access) = 0;
  // Only with Traits::moves_gpu_memory or copies_gpu_memory. The GpuMemory object is not needed after this returns.
  virtual std::unique_ptr<LocalRegion> register_gpu_memory(uint64_t /*id*/, const device::GpuMemory&, Access) {
    return nullptr;
  }
  // Zeroed, page aligned; lives until the LocalRegion is destroyed.
  virtual std::unique_ptr<LocalRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate) = 0;
  // The transport refuses peers from now on.
  virtual void revoke_region(LocalRegion& region) = 0;
  // True once neither a peer nor our progress holder accesses the revoked region. If move_source() is meaningful for
  // this transport, the engine's own work requests that name the region have ended or been moved before it asks.
  virtual bool is_region_quiet(const LocalRegion& region) = 0;
  // Progress holder. Names the known peers that may still access the revoked region.
  virtual std::vector<std::string> users_of(const LocalRegion&) { return {}; }
  // Progress holder. Makes those of our work requests that no device has yet use `to` instead of `from`; both describe
  // the same memory. True once none names `from`; the engine asks until then. True at once if requests do not need
  // their region.
  virtual bool move_source(const LocalRegion&, LocalRegion&) { return true; }

  // --- peers ---
  // Starts connecting; on_link_up or on_link_down follows. Work may be posted before that; it is then not accepted.
  virtual Link* connect(const std::shared_ptr<const Address>& address) = 0;
  // Retires everything posted on the link as kPeerLost and deletes it, without on_link_down.
  virtual void disconnect(Link& link) = 0;
  virtual std::unique_ptr<RemoteKey> resolve(Link& link, const RegionDescriptor& descriptor) = 0;
  // kPending: the peer has not answered yet, ask again. kDone: `out` is filled in. kAccessDenied: this process cannot
  // access that memory. kRegionClosed, kRegionRevoked and others: the peer refuses. gpu: the local GPU whose kernels
  // shall access GPU memory; -1: host memory.
  virtual Status map(Link&, const RemoteKey&, int /*gpu*/, Mapping* /*out*/) { return Status::kAccessDenied; }
  virtual std::vector<PathReport> explain(Link& link) = 0;
  // [any] Says why none of our rails reaches that peer (different kinds of links, another user's memory). Empty: one
  // may.
  virtual std::string why_out_of_reach(const Address&) const { return {}; }
  // Empty: our rail i talks to the peer's rail i modulo the peer's rail count.
  virtual std::vector<RailReport> explain_rails(Link&) { return {}; }
  // How many works towards the peer are in flight on this rail of ours; 0 if works never wait here.
  virtual uint64_t rail_depth(Link&, uint32_t /*rail*/) { return 0; }

  // --- data ---
  // Accepts a prefix of `requests` (one or more, all with the same op and context), as many as there is room for.
  // *completed: how many of these are done already (kDone); the sink is not told about them. May call sink.on_retired
  // for other requests. May leave a sleeping peer asleep until the next poll(), arm() or let_go(). rail: below
  // Traits::rail_count, or kAnyRail if Traits::balances_rails.
  virtual uint32_t post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) = 0;
  // Moves everything that can move now. Returns how many things happened; 0 means idle.
  virtual uint32_t poll() = 0;

  // Takes back the work requests of each context for which wanted() is true, as far as the peer has not begun them.
  // Each is retired through Sink::on_withdrawn: now, or once the part that the peer is working on has ended. A request
  // that the peer has begun in full runs to its end and is retired as usual. What is taken back is always a tail of the
  // requests of one context on one rail of one link, so that no immediate is counted whose bytes were taken back. The
  // engine posts nothing more for these contexts until all of their requests are retired.
  virtual void withdraw(bool (*wanted)(void* context)) = 0;

  // --- sleeping (transport/sleep.h), on several transports at once ---
  // The progress holder arms every transport, looks once more (has_arrivals) and stops being the holder. Then some
  // thread sleeps until a wake_fd() is readable. While armed, an arrival makes it readable, and it stays so until
  // hush(): no arrival between arming and sleeping is lost. While not armed it should stay quiet.
  virtual void arm() = 0;
  virtual void disarm() = 0;
  // A progress holder calls this instead of arm() if it leaves without sleeping and nobody may drive for a long time.
  // The transport does what it had deferred for its peers: it rings them and lets go of their memory.
  virtual void let_go() {}
  virtual bool is_armed() const = 0;  // [any] armed, and not rung since
  virtual bool has_arrivals() = 0;
  // When poll() must be called at the latest, for heartbeats and timeouts. Asked after arm().
  virtual Deadline next_timer() const { return kNoDeadline; }
  virtual int wake_fd() const = 0;  // [any] the same for the transport's life
  // [any] The sleeper calls this when wake_fd() is readable. Silences it until the next arrival and disarms the
  // transport, so that a holder that is about to leave sees that the arrivals have been taken. False: the ring was
  // stale, sleep on. looks_at_once: the sleeper polls as soon as it can, so whatever polling silences may be left to
  // that.
  virtual bool hush(bool looks_at_once) = 0;
  virtual void wake() = 0;  // [any] only costs a system call if somebody sleeps

  // Tells peers, stops its own threads, and retires everything posted (kEngineClosed) before it returns.
  virtual void close() = 0;
  // [any] In a forked child: drops whatever would keep the parent's peers from noticing the parent's death.
  virtual void abandon_after_fork() = 0;
};

// Options that only RDMA transports use.
struct RdmaOptions {
  std::string provider;         // ofi: exact name ("efa", "tcp"); empty: EFA, through efa-direct where available
  int32_t gid_index = -1;       // verbs on RoCE: -1: chosen automatically
  uint32_t traffic_class = 0;   // verbs on RoCE: 0..255
  uint32_t service_level = 0;   // verbs: 0..15
  uint32_t path_mtu_bytes = 0;  // verbs: 256, 512 ... 4096; 0: the port's
  uint32_t partition = 0;       // verbs on InfiniBand: a P_Key, its highest bit is ignored; 0: chosen automatically
  uint32_t chain_length = 16;   // verbs: work requests behind one doorbell, 1..kChainMax

  static constexpr uint32_t kChainMax = 32;
};

// sim: which world, and where in it. Without a simulation this is empty, and engines have threads.
struct Place {
  Simulation* simulation = nullptr;
  uint32_t host = 0;
  uint32_t actor = 0;  // from Simulation::enter
};

// tcp: our identity and whom we trust under TLS. Files in PEM form.
enum class TlsVerify : uint8_t {
  kChain,  // anyone with a certificate from the CA
  kName    // and the certificate must be for the name of the peer's engine
};
struct TlsOptions {
  std::string cert_file;  // our certificate, and the chain up to the CA; empty: no TLS
  std::string key_file;
  std::string ca_file;
  TlsVerify verify = TlsVerify::kChain;

  bool is_on() const { return !cert_file.empty(); }
};

struct TransportOptions {
  // The engine's address, with what the transports opened earlier have added. Transport::address() adds this
  // transport's part: the endpoints of tcp, verbs or ofi.
  Address identity;
  uint32_t rail_count = 1;
  // tcp: IP address or interface name of each rail; verbs and ofi: device ("mlx5_0"), port ("mlx5_0:1"), interface or
  // IP address. Empty: rail_count default ones; for verbs and ofi then 0 means all that are worth it.
  std::vector<std::string> rails;
  uint16_t port = 0;   // tcp: 0 ephemeral; rails that share an IP address take port, port + 1, ...
  std::string secret;  // tcp, verbs, ofi: both sides must know it; may be empty
  TlsOptions tls;
  int64_t peer_timeout_ns = 10'000'000'000;  // tcp, verbs, ofi: a peer that is silent for so long is lost
  uint64_t message_bytes_max = 0;
  int64_t connect_timeout_ns = 0;
  PrivatePath private_path = PrivatePath::kAuto;  // shm
  RdmaOptions rdma;
  // Of RDMA transports. They outlive the transport.
  Clock* clock = &real_clock();
  Entropy* entropy = &kernel_entropy();
  Place place;
};

}  // namespace crossrail
