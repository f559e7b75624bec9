// What the rdma layer asks of a NIC: the border between links, shares, liveness (transport/rdma) and one device port
// (transport/verbs, transport/ofi). A Nic is one rail.
//
// Threads: everything is called by the engine's progress holder, one thread at a time, except where marked [any].
// Re-entry: from inside a NicEvents call the layer calls nothing of any Nic, NicPath or Registration.
//
// A path is what reaches one NIC of one peer. Its life:
//   1. make_path(): objects are made, receives are possible. offer() can be told to the peer.
//   2. connect(): the peer's offer is known. From now on what the peer posts arrives; we may post and send.
//   3. broken: by break_off(), or by itself (on_path_broken). Nothing posted later is accepted.
//   4. flushed: on_path_flushed was said. Nothing of the path is with the NIC any more, in either direction: none of its
//      works touches memory, none of the peer's writes that came by it does, no event of it follows.
//   5. destroyed, by the layer; before step 3 only while nothing was ever posted on it or the peer was never connected.
// After 2 every path goes through 3 and 4, in finite time and without the peer's help; a Nic that loses its device sees
// to it by itself (objects destroyed).
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
inline constexpr size_t kDatagramBytesMax = 1024;  // payload of ours
inline constexpr size_t kFragmentBytesMax = 4096;  // NicPath::send()

// Memory known to one NIC. Threads: [any].
// Lifecycle: 1. registered. 2. revoked: the NIC refuses peers from now on; our own works with it have ended before.
// 3. quiet. 4. destroyed. A registration that is destroyed without step 2 goes through 2 and 3 in the destructor.
class Registration {
 public:
  virtual ~Registration() = default;
  virtual void revoke() = 0;
  // True when no peer's operation that began before revoke() touches the memory any more.
  virtual bool is_quiet() const = 0;

  uint64_t key = 0;           // what peers need, beside the address
  uint64_t remote_base = 0;   // address of the first byte as peers have to give it; the same on all NICs of a transport
  bool is_read_only = false;  // the memory may not be written, so the NIC may not either: access was not kRemoteWrite
  bool is_gpu = false;        // memory that our CPU must not touch
  std::string given_by;       // with is_gpu: "dma-buf", or by what else and why
};

enum class NicOp : uint8_t { kWrite, kRead };

// One work of the RMA kind. Never longer than NicLimits::work_bytes_max.
struct NicWork {
  NicOp op = NicOp::kWrite;
  bool has_imm = false;    // writes only
  bool has_remote = true;  // false: only an immediate, of no region; length_bytes is 0 then
  uint32_t imm = 0;        // as the peer shall see it
  uint32_t reserved = 0;
  std::byte* local = nullptr;
  uint64_t length_bytes = 0;
  const Registration* registration = nullptr;  // of `local`, of this NIC; null only when length_bytes is 0
  uint64_t remote_address = 0;                 // remote_base of the peer's registration + offset
  uint64_t remote_key = 0;
  uint64_t cookie = 0;  // number of the work on its path, from 0, without gaps
};

struct NicLimits {
  uint64_t work_bytes_max = 0;
  uint32_t path_works_max = 0;  // posted on one path and not reported yet: the layer keeps to it
  // Works of one path are carried out in the order of posting: once the peer saw the immediate of one, all before it are
  // in place.
  bool ordered_paths = false;
  // on_imm names the path.
  bool names_imm_paths = false;
  bool takes_gpu_memory = false;
};

// Why a work failed.
enum class NicFault : uint8_t {
  kFlushed,       // its path broke: it may have been carried out, or not, or in part
  kUnreachable,   // likewise: retries ran out, connection reset, any other cause
  kRemoteAccess,  // the peer's NIC refused this very work (key, bounds, rights); it was not counted
  kLocal          // our NIC refused this very work (local key, length); the peer saw nothing of it
};

class NicPath;

// What a NIC tells, from inside poll() only.
class NicEvents {
 public:
  // Done: of writes, the peer has all bytes, and the immediate is or will be told to its layer. through: all works of the
  // path with smaller cookies are done too, and are told so by this call alone.
  virtual void on_work_done(NicPath& path, uint64_t cookie, bool through) = 0;
  // Every accepted work is reported exactly once, by one of the two. code and text: the provider's.
  virtual void on_work_failed(NicPath& path, uint64_t cookie, NicFault fault, int code, const std::string& text) = 0;
  // An immediate of the peer; its bytes are in place. path: null unless NicLimits::names_imm_paths.
  virtual void on_imm(NicPath* path, uint32_t imm) = 0;
  // What the peer sent() whole. path: null if not known. The bytes are the NIC's again when the call returns.
  virtual void on_fragment(NicPath* path, std::span<const uint8_t> bytes) = 0;
  virtual void on_datagram(std::span<const uint8_t> bytes) = 0;
  // Datagrams were sent there, and the peer's host says that nobody takes them: the process that had this endpoint has
  // ended. For NICs that can tell.
  virtual void on_nobody(std::span<const uint8_t> peer_endpoint) = 0;
  // The path broke by itself. Said at most once, not after break_off(). The layer calls break_off() next.
  virtual void on_path_broken(NicPath& path, const std::string& reason) = 0;
  // After break_off(), exactly once, the last event of the path.
  virtual void on_path_flushed(NicPath& path) = 0;
  virtual void on_port(bool is_up, const std::string& detail) = 0;
  // The device is gone for good. Its paths are flushed without anybody's asking: each gets on_path_broken if it was not
  // broken, and on_path_flushed.
  virtual void on_device_fatal(const std::string& reason) = 0;

 protected:
  ~NicEvents() = default;
};

class NicPath {
 public:
  virtual ~NicPath() = default;
  // At most kOfferBytesMax, told to the peer as it is. May be empty.
  virtual std::span<const uint8_t> offer() const = 0;
  // Both as the peer's layer got them from its Nic and NicPath: bytes from outside, to be checked. Throws TransportError.
  virtual void connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) = 0;
  // Takes a prefix, as many as there is room for. On a broken path: none.
  virtual uint32_t post(std::span<const NicWork> works) = 0;
  // Sends head and body as one fragment of at most kFragmentBytesMax; both are copied. False: no room now, or broken.
  // Delivered exactly once unless the path breaks, in any order. No event tells of success; but after a false, room that
  // there is again makes poll() return more than 0, and wakes who sleeps.
  virtual bool send(std::span<const uint8_t> head, std::span<const uint8_t> body) = 0;
  // Nothing that was sent is on its way any more: the peer's NIC has it all.
  virtual bool is_sent() const = 0;
  // Ends the path for good, at once: works under way are carried out or given up, and reported; then on_path_flushed.
  // Idempotent.
  virtual void break_off(const std::string& reason) = 0;

  void* user = nullptr;  // the layer's
};

class Nic {
 public:
  virtual ~Nic() = default;

  // --- [any], fixed for the Nic's life ---
  virtual const std::string& name() const = 0;         // "mlx5_0:1", "127.0.0.1": what rails= calls it
  virtual const std::string& description() const = 0;  // for people, one line: "mlx5_0:1, RoCE v2, 10.0.0.1 on eth2"
  virtual uint32_t speed_mbps() const = 0;             // 0 unknown
  // What kind of network it is (RdmaRails::fabric), the same for all NICs of a transport: libfabric's provider; "" for verbs.
  virtual const std::string& fabric() const = 0;
  // How peers reach it, by datagram and by path. At most kEndpointBytesMax, equal for equal ports.
  virtual std::span<const uint8_t> endpoint() const = 0;
  virtual const NicLimits& limits() const = 0;
  // How well that peer's NIC is reached: 0 not at all (another link layer, address family), 1 perhaps, by routers, 2 same
  // network. Bytes from outside.
  virtual int nearness(std::span<const uint8_t> peer_endpoint) const = 0;

  // [any] Throws TransportError with a remedy (memlock ...).
  virtual std::unique_ptr<Registration> register_memory(std::byte* base, uint64_t length_bytes, Access access) = 0;

  // [any] The same for the Nics' lives. Registrations of `other`, a Nic of the same transport, are good for works of this
  // one too, and for peers that reach it: both are of one device.
  virtual bool shares_registrations_with(const Nic& /*other*/) const { return false; }

  // [any] With NicLimits::takes_gpu_memory. Throws TransportError with a remedy.
  virtual std::unique_ptr<Registration> register_gpu_memory(const device::GpuMemory&, Access) { return nullptr; }

  virtual bool is_port_up() const = 0;
  // At most kDatagramBytesMax, copied. May be lost, doubled, delayed; sent into the void if that endpoint is nonsense,
  // the port is down or there is no room.
  virtual void send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) = 0;
  // Why the latest datagram to that endpoint was not even sent, when it was our own fault; else empty.
  virtual std::string datagram_trouble(std::span<const uint8_t> /*peer_endpoint*/) const { return {}; }
  // Throws TransportError (limits of the device).
  virtual std::unique_ptr<NicPath> make_path() = 0;

  // Tells what has happened, with bounded work. Returns how many things it told or moved on; 0: idle.
  virtual uint32_t poll(NicEvents& events) = 0;

  // --- sleeping, as in transport.h: the layer arms, asks has_arrivals(), sleeps on fds() ---
  // From arm() on news make one of fds() readable. May be called again while armed.
  virtual void arm() = 0;
  // Something to be polled is there already. Asked after arm(); may say yes too often, never no too often.
  virtual bool has_arrivals() = 0;
  // For a Nic that has to be polled by then whatever happens.
  virtual Deadline next_timer() const { return kNoDeadline; }
  // [any] Fixed for the Nic's life. To be waited on with poll(2) or epoll(7) for POLLIN.
  virtual const std::vector<int>& fds() const = 0;
  // [any], the sleeper, beside a progress holder that may be polling: makes fds() quiet until the next arm().
  virtual void hush() = 0;

  // [any] In a forked child: give up what would keep the parent's peers from noticing its death; touch nothing else.
  virtual void abandon_after_fork() = 0;
};

}  // namespace crossrail::rdma
