// The highest speed at which a peer can be reached, by what the two addresses say about their rails.
#pragma once

#include <span>
#include <string>

#include "transport/descriptor.h"
#include "transport/transport.h"

namespace crossrail {

// GB/s of all pairs of rails together: each interface carries no more than its own speed, however many pairs it is in.
// own_devices: of our rails, those on one device share it; of the peer's that is known of those on one IP address. 0:
// some rail's speed is unknown.
double expected_gb_per_s(std::span<const RailReport> pairs, TransportKind kind, const Address& own,
                         std::span<const std::string> own_devices, const Address& peer);

}  // namespace crossrail
