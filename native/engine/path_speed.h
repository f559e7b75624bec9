// How fast a peer is reached at best, by what the two addresses say of their rails.
#pragma once

#include <span>

#include "transport/descriptor.h"
#include "transport/transport.h"

namespace crossrail {

// GB/s of all pairs of rails together: each rail carries no more than its own speed, however many pairs it is in. 0:
// some rail's speed is unknown.
double expected_gb_per_s(std::span<const RailReport> pairs, TransportKind kind, const Address& own,
                         const Address& peer);

}  // namespace crossrail
