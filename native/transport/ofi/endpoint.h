// A libfabric endpoint, with its works, sends and receives in flight.
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

// The context passed to libfabric with an operation; the completion returns it.
struct Op {
  enum class Kind : uint8_t { kWork, kSend, kReceive };
  fi_context2 provider{};  // first: libfabric gets its address, and efa-direct writes to it until the completion
  Kind kind = Kind::kWork;
  bool is_listed = false;   // in flight at the provider
  OfiPath* path = nullptr;  // null: without a path (datagrams), or its path was flushed
  Endpoint* endpoint = nullptr;
  uint64_t cookie = 0;          // for works
  std::byte* buffer = nullptr;  // for sends and receives
  void* descriptor = nullptr;   // of the buffer
  Op* next = nullptr;           // neighbours in the endpoint's list, or in a pool
  Op* previous = nullptr;
};
static_assert(offsetof(Op, provider) == 0);

// Buffers of one size with an Op each, registered if the provider requires that.
class Slots {
 public:
  Slots(const Domain& domain, uint32_t count, Op::Kind kind);
  std::vector<Op>& ops() { return ops_; }

 private:
  Pages memory_;
  Fid<fid_mr> registration_;  // before memory_
  std::vector<Op> ops_;
};

// The header of a packet.
struct PacketHead {
  uint32_t kind = 0;     // Packet
  uint32_t path_id = 0;  // the receiver's, from its offer; 0 for datagrams
  uint64_t number = 0;   // for fences
};
enum class Packet : uint32_t { kDatagram = 0x78720001, kFragment, kHello, kFence, kFenceAnswer };
inline constexpr size_t kPacketBytesMax = sizeof(PacketHead) + 4096;

// Life: 1. opened. 2. close()d: libfabric's object is gone, so that none of its operations moves any more, but its last
// completions may still be in the queue. 3. destroyed, once the queue was read to its end (and some time has passed).
class Endpoint {
 public:
  // receives: how many it keeps posted. Throws TransportError.
  Endpoint(Domain& domain, uint32_t receives);
  // One end of a connection, whose events go to the listener's queue: it dials, or accepts `request`.
  Endpoint(Domain& domain, const Listener& listener, uint32_t receives, fi_info* request);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // For a connection, once; the listener reports the outcome. said: passed to the other side. Both throw
  // TransportError: then it can only be closed.
  void dial(const Name& to, std::span<const uint8_t> said);
  void accept();
  bool is(const struct fid* object) const { return fid_ != nullptr && object == &fid_->fid; }

  fid_ep* fid() const { return fid_; }
  // Not for connections: there, peers dial the listener's name.
  const Name& name() const { return name_; }
  Peers& peers() { return *peers_; }
  // False: the provider is not ready for it; try again.
  bool close();

  // The provider has accepted an operation, or returned it.
  void list(Op& op);
  void unlist(Op& op);
  Op* first() const { return first_; }  // works and sends; receives are not listed
  uint32_t outstanding() const { return outstanding_; }

  void post_receive(Op& op);
  // Posts receives that the provider had no room for. Returns how many it accepted.
  uint32_t post_starved_receives();

  uint64_t option_bytes(int option, uint64_t otherwise) const;
  OfiPath* owner = nullptr;  // if the endpoint belongs to a single path

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
