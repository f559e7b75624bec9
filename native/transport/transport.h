// The contract between the engine and whatever carries its bytes. One instance serves one engine.
//
// Threads: calls marked [any] may come from any thread at any time between open and close. All others come from the
// progress holder: one thread at a time, ordered by the engine's progress lock.
//
// What a transport promises: every accepted work request is retired exactly once, by post(), Sink::on_retired or
// Sink::on_withdrawn; once it is retired, this side touches neither its source nor its target any more, and, where the status is kDone, the
// peer has all of it and will count its immediate. Immediates are counted after the bytes they belong to are in place.
// What it does not promise: any order, unless Traits::fifo_rails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "device/vmm.h"
#include "transport/descriptor.h"
#include "transport/stage.h"
#include "transport/types.h"
#include "util/clock.h"

namespace crossrail {

// One engine that we send to. Owned by the transport, from connect() until Sink::on_link_down or disconnect().
class Link {
 public:
  virtual ~Link() = default;
  // Pairs of rails that it spreads over, those included that are away just now: the same from on_link_up on. Asked only when
  // Traits::balances_rails: with one, cutting a write gains nothing.
  virtual uint32_t lanes() const { return 1; }
  void* user = nullptr;  // the engine's Peer
};

// The transport's half of a local region. Destroyed after close_region said yes.
class LocalRegion {
 public:
  virtual ~LocalRegion() = default;
  std::byte* base = nullptr;
  uint64_t length_bytes = 0;
  uint64_t id = 0;         // the engine's, given at registration
  bool is_mapped = false;  // peers of this host can map it
  int gpu = -1;            // whose memory it is; -1: the host's
  // Of an RDMA transport: what the region's descriptor tells peers. The same for the region's life.
  virtual RdmaKeys rdma_keys() const { return {}; }
  // Of a GPU's memory: by what means NICs were given it, for people ("dma-buf").
  virtual std::string given_by() const { return {}; }
};

// The transport's half of a peer's region. Owned by the engine; dies before the link does.
class RemoteKey {
 public:
  virtual ~RemoteKey() = default;
};

// kService: what the peer's engine itself is told (Sink::on_service). At most kServiceBytesMax, kept in place until it is
// retired; kDone then says that the peer's engine has it. Never held back by the peer's receive pool, nor by messages.
enum class WorkOp : uint8_t { kWrite, kRead, kSend, kService };
inline constexpr uint64_t kMessageBytesMax = 256 << 10;  // of kSend, whatever an engine is set to send
inline constexpr uint64_t kServiceBytesMax = 4000;       // a fragment of rdma
inline constexpr uint32_t kServicesQueuedMax = 64;       // of one link, accepted and not retired: post() takes no more

// A peer's memory at an address of ours. It stays readable and writable for as long as `memory` is held, whatever becomes
// of the peer and of its region: afterwards nobody else has it.
struct Mapping {
  std::shared_ptr<const void> memory;
  std::byte* base = nullptr;
  uint64_t length_bytes = 0;  // of the region, as its owner says
  // Of a GPU's, instead: what is still to be mapped, and where the region begins in it.
  std::shared_ptr<const device::PhysicalMemory> physical;
  uint64_t offset = 0;
  std::string trouble;  // of kAccessDenied, kTransportFailed; may be empty
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
  void* context = nullptr;              // given back when retired
  uint32_t tag = 0;                     // given back likewise; requests of one context may differ in it
  uint32_t reserved = 0;                // the engine's own
};
static_assert(sizeof(WorkRequest) == 64);
// Whose memory the request's local side is; -1: the host's.
inline int gpu_of(const WorkRequest& request) {
  return request.local_region == nullptr ? -1 : request.local_region->gpu;
}

struct Traits {
  uint32_t rail_count = 1;
  uint64_t slice_bytes_max = 0;  // longest work request it likes: longer writes are cut, so that small ones get between
  uint64_t message_bytes_max = 0;
  bool fifo_rails = false;  // on one rail of one link, a write's bytes and immediate land no earlier than those of
                            // the writes posted before it
  // The transport spreads over its rails what is posted with kAnyRail; the engine names a rail only where the user did.
  bool balances_rails = false;
  // It has room of its own for works of up to so many bytes that are not `bulk`: the engine keeps none of them waiting
  // behind longer ones. 0: all queue together.
  uint64_t short_bytes_max = 0;
  uint64_t piece_bytes_min = 16 << 10;  // a piece for another rail is worth its overhead from here on
  bool moves_gpu_memory = false;        // by NICs; else this side's CPU touches sources or targets,
  bool copies_gpu_memory = false;       // and has the driver copy what is a GPU's
};

// What a transport tells the engine, from inside post() and poll(), on the progress holder.
class Sink {
 public:
  // `count` work requests with this context and tag, `bytes` in all, will not be touched any more. detail: may be
  // empty.
  virtual void on_retired(Link& link, void* context, uint32_t tag, uint32_t count, uint64_t bytes, Status status,
                          const std::string& detail) = 0;
  // One work request was taken back (withdraw) and is retired so: its immediate is not counted and never will be, of its
  // bytes some may be in place. Called once for each; where several of one context and tag go together, `bytes` may be
  // the sum of theirs at one call and 0 at the others.
  virtual void on_withdrawn(Link& link, void* context, uint32_t tag, uint64_t bytes) = 0;
  // Immediates arrived: `units` 48ths of the number `imm`.
  virtual void on_imm(uint32_t imm, uint64_t units) = 0;
  enum class Offer : uint8_t { kTaken, kHold, kTooLong };
  // A message arrived. kHold: keep it and offer it again at the next poll.
  virtual Offer on_message(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) = 0;
  // What the peer's engine tells ours: untrusted, 0..kServiceBytesMax bytes. Once for each, in any order. Takes a note.
  virtual void on_service(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) = 0;
  virtual void on_link_up(Link& link) = 0;
  // The peer is gone: post no more. Everything still posted on the link is retired next, then the link is deleted.
  // What the peer was told is done has been reported (on_imm) before. orderly: its engine was closed, not killed.
  virtual void on_link_down(Link& link, const std::string& reason, bool orderly) = 0;
  virtual void on_link_frozen(Link& link, bool frozen, const std::string& detail) = 0;
  virtual void on_protocol_error(const std::string& peer, const std::string& detail) = 0;
  // [any] What peers are told that name a region which is not open: kRegionRevoked or, closed or unknown, kRegionClosed.
  virtual Status status_of_gone(uint64_t /*region_id*/) { return Status::kRegionClosed; }
  // For the record, of a transport that balances its rails: `count` works of this context, `bytes` in all and `imms` of
  // them with an immediate, were put on `rail`; or are over there, said before on_retired, not instead.
  virtual void on_sent(Link& /*link*/, uint32_t /*rail*/, void* /*context*/, uint32_t /*count*/, uint64_t /*bytes*/,
                       uint32_t /*imms*/) {}
  virtual void on_over(Link& /*link*/, uint32_t /*rail*/, void* /*context*/, uint32_t /*count*/, uint64_t /*bytes*/) {}
  // A connection or path of this rail that carried works broke.
  virtual void on_rail_broken(Link& /*link*/, uint32_t /*rail*/) {}
  // `count` works that it carried are put on a rail once more.
  virtual void on_sent_again(Link& /*link*/, uint32_t /*rail*/, uint32_t /*count*/) {}

 protected:
  ~Sink() = default;
};

struct PathReport {
  std::string what;
  std::string path;
  std::string reason;
  double gb_per_s = 0;
  uint64_t bytes = 0;
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
  // Once, after all transports of the engine are open and before any other call: the engine's whole address, which is
  // what peers are to be shown. Those opened last know it already.
  virtual void complete_address(const Address&) {}

  // --- memory [any]. id: never used before in this incarnation; its slot (region_slot) is no other open region's ---
  virtual std::unique_ptr<LocalRegion> register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                                       Access access) = 0;
  // Only with Traits::moves_gpu_memory or copies_gpu_memory. The object is not needed any more when this has returned.
  virtual std::unique_ptr<LocalRegion> register_gpu_memory(uint64_t /*id*/, const device::GpuMemory&, Access) {
    return nullptr;
  }
  // Zeroed, page aligned; lives until the LocalRegion is destroyed.
  virtual std::unique_ptr<LocalRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate) = 0;
  // Refuses peers from now on.
  virtual void revoke_region(LocalRegion& region) = 0;
  // True when neither a peer nor our progress holder touches the revoked region any more. Where move_source() means
  // something, our own work requests that name the region have ended, or were moved, before this is asked.
  virtual bool is_region_quiet(const LocalRegion& region) = 0;
  // Progress holder. Names of the peers that may still touch the revoked region, as far as it is known who they are.
  virtual std::vector<std::string> users_of(const LocalRegion&) { return {}; }
  // Progress holder. Our own work requests that name `from` and are not with a device yet go on with `to`, which is the
  // same memory. True when none names `from` any more: asked until then. True at once where work requests do not need
  // the region they name.
  virtual bool move_source(const LocalRegion&, LocalRegion&) { return true; }

  // --- peers ---
  // Starts connecting; on_link_up or on_link_down follows. Work may be posted before that; it is then not accepted.
  virtual Link* connect(const std::shared_ptr<const Address>& address) = 0;
  // Retires everything posted on the link as kPeerLost and deletes it, without on_link_down.
  virtual void disconnect(Link& link) = 0;
  virtual std::unique_ptr<RemoteKey> resolve(Link& link, const RegionDescriptor& descriptor) = 0;
  // kPending: the peer has not answered yet what region that is, ask again. kDone: `out` is filled. kAccessDenied: this
  // process cannot touch that memory. kRegionClosed, kRegionRevoked and others: the peer refuses. gpu: of ours, whose kernels
  // are to reach memory of a GPU; -1: host memory.
  virtual Status map(Link&, const RemoteKey&, int /*gpu*/, Mapping* /*out*/) { return Status::kAccessDenied; }
  virtual std::vector<PathReport> explain(Link& link) = 0;
  // [any] Why none of that peer's rails is in reach of ours (other kinds of links, another user's memory); empty: some is,
  // or nobody can tell.
  virtual std::string why_out_of_reach(const Address&) const { return {}; }
  // Empty: rail i to the peer's rail i, modulo how many it has.
  virtual std::vector<RailReport> explain_rails(Link&) { return {}; }
  // Works that are on this rail of ours towards the peer and not over; 0 where none ever wait.
  virtual uint64_t rail_depth(Link&, uint32_t /*rail*/) { return 0; }

  // --- data ---
  // `requests`: one or more, all of one op and one context. Takes a prefix of them, as many as there is room for.
  // *completed: how many of the accepted are done already
  // (kDone) and are not retired through the sink. May call sink.on_retired for others. A sleeping peer may be woken only
  // at the next poll(), arm() or let_go(). rail: less than Traits::rail_count; or, with Traits::balances_rails, kAnyRail.
  virtual uint32_t post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) = 0;
  // Moves everything that can move now. Returns how many things happened; 0 means idle.
  virtual uint32_t poll() = 0;

  // Takes back what is posted but not begun by the peer, of every context for which wanted() says so. Each such work
  // request is retired through Sink::on_withdrawn, now or, when the peer is at a part of it, once that part has ended.
  // What the peer has wholly begun runs to its end and is retired as ever. The last goes first: of the requests of one
  // context on one rail of one link, what is taken back is a tail, so that an immediate is never counted whose bytes were
  // taken back. The engine posts no more of these contexts until all of theirs is retired.
  virtual void withdraw(bool (*wanted)(void* context)) = 0;

  // --- sleeping (transport/sleep.h), on several transports at once ---
  // The progress holder arms each, looks once more (has_arrivals), gives up being the holder, and somebody sleeps until
  // one of the wake_fd()s is readable. While armed, news make it readable, and it stays so until hush(): none is lost
  // between arming and sleeping. While not armed it should keep quiet.
  virtual void arm() = 0;
  virtual void disarm() = 0;
  // Instead of arm(), by a progress holder who leaves and does not sleep, where nobody may come back for long: what peers
  // wait for that needs nothing of them is not put off any more. They are rung, and their memory is let go.
  virtual void let_go() {}
  virtual bool is_armed() const = 0;  // [any] armed, and nobody has rung since
  virtual bool has_arrivals() = 0;
  // poll() wants to be called by then, whatever happens: heartbeats, timeouts. Asked after arm().
  virtual Deadline next_timer() const { return kNoDeadline; }
  virtual int wake_fd() const = 0;  // [any] the same for the transport's life
  // [any] The sleeper found wake_fd() readable: makes it quiet until there are news again, and the transport unarmed, so
  // that a holder who is about to leave sees that these are taken. False: there were none (an old ring, from when nobody
  // slept), sleep on. looks_at_once: the sleeper polls as soon as he can; what that alone silences may be left to it.
  virtual bool hush(bool looks_at_once) = 0;
  virtual void wake() = 0;  // [any] only costs a system call if somebody sleeps

  // Tells peers and stops own threads. Everything posted is retired (kEngineClosed) before it returns.
  virtual void close() = 0;
  // [any] In the child of a fork: give up what would keep the parent's peers from noticing its death.
  virtual void abandon_after_fork() = 0;
};

// What only RDMA transports ask.
struct RdmaOptions {
  std::string provider;         // ofi: exact name ("efa", "tcp"); empty: EFA, by efa-direct if there is that
  int32_t gid_index = -1;       // verbs on RoCE: -1 by choice
  uint32_t traffic_class = 0;   // verbs on RoCE: 0..255
  uint32_t service_level = 0;   // verbs: 0..15
  uint32_t path_mtu_bytes = 0;  // verbs: 256, 512 ... 4096; 0: the port's
  uint32_t partition = 0;       // verbs on InfiniBand: a P_Key, its highest bit does not matter; 0 by choice
};

// sim: where in which world. Elsewhere there is no stage, and engines have threads.
struct Place {
  Stage* stage = nullptr;
  uint32_t host = 0;
  uint32_t actor = 0;  // of Stage::enter
};

// tcp: who we are and whom we trust under TLS. Files in PEM form.
enum class TlsVerify : uint8_t {
  kChain,  // whoever has a certificate of the CA
  kName    // and it is for the name of the peer's engine
};
struct TlsOptions {
  std::string cert_file;  // ours, and those between it and the CA; empty: no TLS
  std::string key_file;
  std::string ca_file;
  TlsVerify verify = TlsVerify::kChain;

  bool is_on() const { return !cert_file.empty(); }
};

struct TransportOptions {
  // Who the engine is, with what the transports opened before have added. Transport::address() is this and what this
  // transport adds: tcp its endpoints, verbs and ofi theirs.
  Address identity;
  uint32_t rail_count = 1;
  // tcp: IP address or interface name of each rail; verbs and ofi: device ("mlx5_0"), port ("mlx5_0:1"), interface or IP
  // address. Empty: rail_count default ones; for verbs and ofi then 0 means all that are worth it.
  std::vector<std::string> rails;
  uint16_t port = 0;   // tcp: 0 ephemeral; rails that share an IP address take port, port + 1, ...
  std::string secret;  // tcp, verbs, ofi: both sides must know it; may be empty
  TlsOptions tls;
  int64_t peer_timeout_ns = 10'000'000'000;  // tcp, verbs, ofi: a peer that is silent for so long is lost
  uint64_t message_bytes_max = 0;
  int64_t connect_timeout_ns = 0;
  int private_path = 0;  // shm: 0 by measurement, 1 staged, 2 cross-memory attach
  RdmaOptions rdma;
  // Of RDMA transports. They outlive the transport.
  Clock* clock = &real_clock();
  Entropy* entropy = &kernel_entropy();
  Place place;
};

}  // namespace crossrail
