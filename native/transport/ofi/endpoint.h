// A libfabric endpoint, with the works, sends and receives that are in flight on it.
#pragma once

#include <rdma/fabric.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/ofi/domain.h"
#include "util/pages.h"

namespace crossrail::ofi {

class Endpoint;
class Listener;
class OfiPath;

// The context passed to libfabric with an operation; it comes back with the completion.
struct Op {
  enum class Kind : uint8_t { kWork, kSend, kReceive };
  fi_context2 provider{};  // first: libfabric gets its address, and efa-direct writes here until the completion
  Kind kind = Kind::kWork;
  bool is_listed = false;   // with the provider
  OfiPath* path = nullptr;  // null: of no path (datagrams), or of one that was flushed
  Endpoint* endpoint = nullptr;
  uint64_t cookie = 0;          // of works
  std::byte* buffer = nullptr;  // of sends and receives
  uint32_t length_bytes = 0;    // of sends
  void* descriptor = nullptr;   // of the buffer
  Op* next = nullptr;           // neighbours in the list of the endpoint, or of a pool
  Op* previous = nullptr;
};
static_assert(offsetof(Op, provider) == 0);

// Buffers of one size with an Op each, registered where the provider asks for it.
class Slots {
 public:
  Slots(const Domain& domain, uint32_t count, Op::Kind kind);
  std::vector<Op>& ops() { return ops_; }

 private:
  Pages memory_;
  Fid<fid_mr> registration_;  // before memory_
  std::vector<Op> ops_;
};

// Of a packet: what stands before the payload.
struct PacketHead {
  uint32_t kind = 0;     // Packet
  uint32_t path_id = 0;  // the receiver's, from its offer; 0 for datagrams
  uint64_t number = 0;   // of fences
};
enum class Packet : uint32_t { kDatagram = 0x78720001, kFragment, kHello, kFence, kFenceAnswer };
inline constexpr size_t kPacketBytesMax = sizeof(PacketHead) + 4096;

// Life: 1. opened. 2. close()d: libfabric's object is gone, so that nothing of it moves any more, but its last
// completions may still lie in the queue. 3. destroyed, once the queue was read to its end (and some time has passed).
class Endpoint {
 public:
  // receives: how many it keeps posted. Throws TransportError.
  Endpoint(Domain& domain, uint32_t receives);
  // One end of a connection, whose events go to the listener's queue: it dials, or accepts `request`.
  Endpoint(Domain& domain, const Listener& listener, uint32_t receives, fi_info* request);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Of a connection, once; the listener tells how it went. said: to the other side. Throw TransportError: it can only
  // be closed then.
  void dial(const Name& to, std::span<const uint8_t> said);
  void accept();
  bool is(const struct fid* object) const { return fid_ != nullptr && object == &fid_->fid; }

  fid_ep* fid() const { return fid_; }
  // Neither of a connection: its listener's name is what peers dial.
  const Name& name() const { return name_; }
  Peers& peers() { return *peers_; }
  bool is_closed() const { return fid_ == nullptr; }
  // False: the provider is not ready for it; try again.
  bool close();

  // An operation was accepted by the provider, or came back.
  void list(Op& op);
  void unlist(Op& op);
  Op* first() const { return first_; }  // works and sends; receives are not listed
  uint32_t outstanding() const { return outstanding_; }

  void post_receive(Op& op);
  // Those that the provider had no room for. Returns how many went.
  uint32_t post_starved_receives();

  uint64_t option_bytes(int option, uint64_t otherwise) const;
  OfiPath* owner = nullptr;  // of an endpoint of one path

 private:
  void open(fi_info& info, const Listener* listener);
  void bind_and_enable(const Listener* listener);
  void read_name();
  void set_efa_options();
  bool is_option_set(int option) const;
  void post_receives();

  Domain& domain_;
  std::unique_ptr<Peers> peers_;  // until fid_ is closed
  fid_ep* fid_ = nullptr;
  Name name_;
  Op* first_ = nullptr;
  uint32_t outstanding_ = 0;
  std::unique_ptr<Slots> receives_;
  std::vector<Op*> starved_;
};

}  // namespace crossrail::ofi
