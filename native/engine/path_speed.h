// The highest speed at which a peer can be reached, going by what the two addresses say about their rails.
#pragma once

#include <span>
#include <string>

#include "transport/descriptor.h"
#include "transport/transport.h"

namespace crossrail {

// GB/s of all pairs of rails together: an interface carries no more than its own speed, however many pairs it is in.
// own_devices: those of our rails that are on one device share its speed; on the peer's side, that is known only of
// rails with the same IP address. 0: some rail's speed is unknown.
double expected_gb_per_s(std::span<const RailReport> pairs, TransportKind kind, const Address& own,
                         std::span<const std::string> own_devices, const Address& peer);

}  // namespace crossrail
