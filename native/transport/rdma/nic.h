// What the rdma layer (transport/rdma: links, shares, liveness) requires of one device port (transport/verbs,
// transport/ofi). A Nic is one rail.
//
// Threads: everything is called by the engine's progress holder, one thread at a time, except where marked [any].
// Re-entry: from inside a NicEvents call the layer calls nothing on any Nic, NicPath or Registration.
//
// A path leads to one NIC of one peer. Its life:
//   1. make_path(): objects are created, receives are possible. offer() can be sent to the peer.
//   2. connect(): the peer's offer is known. From now on what the peer posts arrives; we may post and send.
//   3. broken: by break_off(), or on its own (on_path_broken). Nothing posted later is accepted.
//   4. flushed: on_path_flushed was called. Neither works of the path nor the peer's writes through it touch memory any
//      more, and no event of it follows.
//   5. destroyed, by the layer; before step 3 only if nothing was ever posted on it or the peer was never connected.
// After step 2 every path goes through 3 and 4, in finite time and without the peer's help. A Nic that loses its device
// does both on its own (objects destroyed).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "transport/types.h"
#include "util/clock.h"

namespace crossrail::rdma {

inline constexpr size_t kEndpointBytesMax = 64;    // Nic::endpoint()
inline constexpr size_t kOfferBytesMax = 128;      // NicPath::offer()
inline constexpr size_t kDatagramBytesMax = 1024;  // of our payload
inline constexpr size_t kFragmentBytesMax = 4096;  // NicPath::send()

// A key that no NIC issues (libfabric's FI_KEY_NOTAVAIL; verbs keys have 32 bits): the rail does not know the region.
inline constexpr uint64_t kNoKey = ~uint64_t{0};

// Memory known to one NIC. Threads: [any].
// Lifecycle: 1. registered. 2. revoked: the NIC refuses peers from now on; our own works with it have ended before. 3.
// quiet. 4. destroyed. Destroying a registration without step 2 performs 2 and 3 in the destructor.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual void revoke() = 0;
  // True once no peer operation that began before revoke() touches the memory any more.
  virtual bool is_quiet() const = 0;

  uint64_t key = 0;           // what peers need, besides the address
  uint64_t remote_base = 0;   // address of the first byte for peers; the same on all NICs of a transport
  bool is_read_only = false;  // the memory is read-only, for NICs too: access was not kRemoteWrite
  bool is_gpu = false;        // our CPU must not touch the memory
  std::string given_by;       // if is_gpu: "dma-buf", or another means and why
};

enum class NicOp : uint8_t { kWrite, kRead };

// One RMA work. Never longer than NicLimits::work_bytes_max.
struct NicWork {
  NicOp op = NicOp::kWrite;
  bool has_imm = false;    // writes only
  bool has_remote = true;  // false: an immediate without a region; length_bytes is 0 then
  uint32_t imm = 0;        // as the peer shall see it
  uint32_t reserved = 0;
  std::byte* local = nullptr;
  uint64_t length_bytes = 0;
  const Registration* registration = nullptr;  // of `local`, at this NIC; null only if length_bytes is 0
  uint64_t remote_address = 0;                 // remote_base of the peer's registration + offset
  uint64_t remote_key = 0;
  uint64_t cookie = 0;  // works of a path are numbered from 0, without gaps
};

struct NicLimits {
  uint64_t work_bytes_max = 0;
  uint32_t path_works_max = 0;  // the layer never has more works posted and unreported on one path
  // A path executes its works in the order of posting: once the peer has seen the immediate of one, all works before it
  // are in place.
  bool ordered_paths = false;
  // on_imm names the path.
  bool names_imm_paths = false;
  bool takes_gpu_memory = false;
};

// Why a work failed.
enum class NicFault : uint8_t {
  // Its path broke: the work may have been executed completely, in part, or not at all. If this is the first failure
  // that an ordered path reports, most likely none of our works broke the path: something that the peer posted was
  // refused.
  kFlushed,
  kUnreachable,   // likewise: retries were exhausted, the connection was reset, or another cause
  kRemoteAccess,  // the peer's NIC refused this work (key, bounds, rights) and did not count it
  kLocal          // our NIC refused this work (local key, length), and the peer saw nothing of it
};

class NicPath;

// A NIC calls these, from inside poll() only.
class NicEvents {
 public:
  // The work is done: for a write, the peer has all bytes, and its layer has been or will be told of the immediate.
  // through: all works of the path with smaller cookies are done, too; no other call reports them.
  virtual void on_work_done(NicPath& path, uint64_t cookie, bool through) = 0;
  // on_work_done or on_work_failed reports every accepted work exactly once. code and text: the provider's.
  virtual void on_work_failed(NicPath& path, uint64_t cookie, NicFault fault, int code, const std::string& text) = 0;
  // An immediate arrived; its bytes are in place. path: null unless NicLimits::names_imm_paths.
  virtual void on_imm(NicPath* path, uint32_t imm) = 0;
  // A fragment from the peer's send() arrived. path: null if unknown. The NIC reuses the bytes when the call returns.
  virtual void on_fragment(NicPath* path, std::span<const uint8_t> bytes) = 0;
  virtual void on_datagram(std::span<const uint8_t> bytes) = 0;
  // The peer's host reports that nobody receives datagrams at this endpoint any more. Not every NIC can tell.
  virtual void on_nobody(std::span<const uint8_t> peer_endpoint) = 0;
  // The path broke on its own. Called at most once, and not after break_off(). The layer calls break_off() next.
  // by_peer: it broke because of something that the peer did, and none of our works is to blame.
  virtual void on_path_broken(NicPath& path, bool by_peer, const std::string& reason) = 0;
  // Called exactly once after break_off(), as the path's last event.
  virtual void on_path_flushed(NicPath& path) = 0;
  // Also called when the speed has changed.
  virtual void on_port(bool is_up, const std::string& detail) = 0;
  // The device is gone and does not come back. The NIC flushes its paths on its own: each gets on_path_broken, unless
  // it was already broken, and on_path_flushed.
  virtual void on_device_fatal(const std::string& reason) = 0;

 protected:
  ~NicEvents() = default;
};

class NicPath {
 public:
  virtual ~NicPath() = default;
  // The layer passes it to the peer unchanged. At most kOfferBytesMax, may be empty.
  virtual std::span<const uint8_t> offer() const = 0;
  // Takes what the peer's layer got from its Nic and NicPath: untrusted bytes, to be checked. Throws TransportError.
  virtual void connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) = 0;
  // Accepts a prefix, as many as there is room for; none on a broken path.
  virtual uint32_t post(std::span<const NicWork> works) = 0;
  // Copies head and body and sends them as one fragment of at most kFragmentBytesMax. False: no room now, or broken.
  // Fragments are delivered exactly once unless the path breaks, in any order. No event reports success; but after a
  // false, new room makes poll() return more than 0 and wakes the sleeper.
  virtual bool send(std::span<const uint8_t> head, std::span<const uint8_t> body) = 0;
  // True once the peer's NIC has everything that was sent.
  virtual bool is_sent() const = 0;
  // Ends the path at once; it cannot be used again. The NIC executes or abandons outstanding works and reports them,
  // then calls on_path_flushed. Idempotent.
  virtual void break_off(const std::string& reason) = 0;

  void* user = nullptr;  // for the layer's use
};

class Nic {
 public:
  virtual ~Nic() = default;

  // --- [any], fixed for the Nic's life ---
  virtual const std::string& name() const = 0;           // its name in rails=: "mlx5_0:1", "127.0.0.1"
  virtual std::string device() const { return name(); }  // the device that several ports share
  virtual const std::string& description() const = 0;    // for people, one line: "mlx5_0:1, RoCE v2, 10.0.0.1 on eth2"
  virtual uint32_t speed_mbps() const = 0;               // 0: unknown. It may change; on_port reports that
  // The kind of network (RdmaRails::fabric), the same for all NICs of a transport: libfabric's provider; "" for verbs.
  virtual const std::string& fabric() const = 0;
  // Where peers reach it, for datagrams and paths. At most kEndpointBytesMax, equal for equal ports.
  virtual std::span<const uint8_t> endpoint() const = 0;
  virtual const NicLimits& limits() const = 0;
  // How well it reaches that peer's NIC. 0: not at all (different link layer or address family); 1: perhaps, through
  // routers; 2: same network. Untrusted bytes.
  virtual int nearness(std::span<const uint8_t> peer_endpoint) const = 0;

  // [any] Throws TransportError with a remedy (memlock ...).
  virtual std::unique_ptr<Registration> register_memory(std::byte* base, uint64_t length_bytes, Access access) = 0;

  // [any] Constant. Whether works and peers of this Nic may use registrations of `other`, a Nic of the same transport:
  // true if both belong to one device.
  virtual bool shares_registrations_with(const Nic& /*other*/) const { return false; }

  // [any] Constant. Without NicLimits::takes_gpu_memory: why, and what helps; empty: this kind of NIC never does.
  virtual std::string no_gpu_memory() const { return {}; }
  // [any] With NicLimits::takes_gpu_memory. Throws TransportError with a remedy.
  virtual std::unique_ptr<Registration> register_gpu_memory(const device::GpuMemory&, Access) { return nullptr; }

  virtual bool is_port_up() const = 0;
  // Copies at most kDatagramBytesMax. The datagram may be lost, duplicated or delayed; it is lost if the endpoint is
  // invalid, the port is down or there is no room.
  virtual void send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) = 0;
  // Why the latest datagram to that endpoint was not even sent, if the cause was on our side; else empty.
  virtual std::string datagram_trouble(std::span<const uint8_t> /*peer_endpoint*/) const { return {}; }
  // What may be wrong if datagrams to that endpoint pass but works repeatedly get no answer; empty: nothing known.
  virtual std::string silence_hint(std::span<const uint8_t> /*peer_endpoint*/) const { return {}; }
  // Throws TransportError (device limits).
  virtual std::unique_ptr<NicPath> make_path() = 0;

  // Somebody is waiting for paths to be flushed, and nothing else happens until they are. A NIC that makes them wait
  // for works on other paths breaks those off once no work has ended for some tens of milliseconds.
  virtual void hurry() {}

  // Reports what has happened, with bounded work. Returns how many things it has reported or advanced; 0: idle.
  virtual uint32_t poll(NicEvents& events) = 0;

  // --- sleeping, as in transport.h: the layer arms, asks has_arrivals(), sleeps on fds() ---
  // From arm() on, an arrival makes one of fds() readable. May be called again while armed.
  virtual void arm() = 0;
  // Whether there is something to poll already. Asked after arm(). May be true too often, never false too often.
  virtual bool has_arrivals() = 0;
  // When the Nic must be polled at the latest.
  virtual Deadline next_timer() const { return kNoDeadline; }
  // [any] Constant. The sleeper waits on them with poll(2) or epoll(7) for POLLIN.
  virtual const std::vector<int>& fds() const = 0;
  // [any] The sleeper silences fds() until the next arm(); a progress holder may be polling meanwhile.
  virtual void hush() = 0;

  // The engine was closed, and may be kept for a long time: gives back whatever peers can reach of the NIC, and its
  // buffers. Every path has been destroyed; nothing is polled or armed any more. Calls marked [any] keep working,
  // though register_memory() may throw EngineClosedError.
  virtual void close() {}

  // [any] In a forked child: drops whatever would keep the parent's peers from noticing its death; touches nothing
  // else.
  virtual void abandon_after_fork() = 0;
};

}  // namespace crossrail::rdma
