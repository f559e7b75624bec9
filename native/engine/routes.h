// Chooses the transport that reaches a peer, from both addresses and from the transports that this engine wanted but
// does not have.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "transport/descriptor.h"

namespace crossrail {

// A transport that would normally have been opened, and was not. is_fault: although its device is there.
struct Absent {
  TransportKind kind;
  std::string reason;
  bool is_fault = false;
};

struct ChosenTransport {
  TransportKind kind;
  std::string reason;  // for people
};

// Why our rails cannot reach the peer's rails of a transport; empty: they can, as far as one can tell beforehand.
using WhyOutOfReach = std::function<std::string(TransportKind)>;

// shm within a host, else verbs, else ofi, else tcp. The reason tells what ruled out a better one. Throws UsageError
// that says what to change if there is no route to that address.
ChosenTransport choose_transport(const Address& own, const Address& peer, std::span<const Absent> absent,
                                 const WhyOutOfReach& why_out_of_reach);

}  // namespace crossrail
