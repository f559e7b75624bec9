// Chooses the transport that reaches a peer, from both addresses and from the transports that this engine wanted and
// does not have.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "transport/descriptor.h"

namespace crossrail {

// A transport that this engine would have opened by itself, and did not. is_fault: although its device is there.
struct Absent {
  TransportKind kind;
  std::string reason;
  bool is_fault = false;
};

struct ChosenTransport {
  TransportKind kind;
  std::string reason;  // for people
};

// Why the peer's rails of a transport are out of ours' reach; empty: they are not, as far as one can tell beforehand.
using WhyOutOfReach = std::function<std::string(TransportKind)>;

// shm within a host, else verbs, else ofi, else tcp. What stood in the way of a better one is in the reason. Throws
// UsageError that says what to change when there is no way to that address.
ChosenTransport choose_transport(const Address& own, const Address& peer, std::span<const Absent> absent,
                                 const WhyOutOfReach& why_out_of_reach);

}  // namespace crossrail
