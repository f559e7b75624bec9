// Where a NIC of a provider with connections (Rules::connects) is dialed, and where it learns what becomes of
// connections.
#pragma once

#include <rdma/fi_eq.h>

#include <optional>
#include <vector>

#include "transport/ofi/domain.h"

namespace crossrail::ofi {

inline constexpr size_t kNameBytesMax = 64;  // room for what fi_getname returns

struct ConnectionEvent {
  enum class Kind : uint8_t { kRequest, kConnected, kEnded };
  Kind kind = Kind::kEnded;
  // The endpoint that the last two are about. It may be closed by now: compare only, never dereference.
  const struct fid* endpoint = nullptr;
  Info request;               // to be accepted by an endpoint created from it, or rejected
  std::vector<uint8_t> said;  // by the peer, with its request or rejection
  int code = 0;               // for kEnded: 0 it ended, else why it was never made (fi_errno)
};

// One passive endpoint and one event queue for the NIC's whole lifetime. That long, because tcp (2.5 at least) keeps a
// pointer to the passive endpoint with each socket that it has accepted and that has not said yet what it wants: if the
// passive endpoint were closed earlier, the next byte from such a socket would crash the process.
// Threads: the progress holder.
class Listener {
 public:
  explicit Listener(const Domain& domain);  // throws TransportError
  ~Listener();                              // after all endpoints that it was bound to
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  const Name& name() const { return name_; }  // where peers dial it
  fid_eq* queue() const { return queue_.get(); }
  // Readable when next() has something to do; -1: call it from time to time.
  int wait_fd() const { return wait_fd_; }

  // Drives the provider's connections, and everything else with them: some system calls. Nothing: no more for now.
  // Throws TransportError: the queue is unusable.
  std::optional<ConnectionEvent> next();
  // What is said tells the dialing side that somebody was there.
  void reject(const fi_info& request) const;

 private:
  std::optional<ConnectionEvent> next_error();

  const Domain& domain_;
  Fid<fid_eq> queue_;
  Fid<fid_pep> endpoint_;
  Name name_;
  int wait_fd_ = -1;
};

}  // namespace crossrail::ofi
