// The identity of this engine.
#pragma once

#include <cstdint>
#include <string>

#include "transport/descriptor.h"
#include "transport/simulation.h"

namespace crossrail {

// A fresh incarnation on this host, without endpoints yet. transports: mask of transport_bit()s. Throws TransportError
// when the kernel gives no random bytes, and as host_identity().
Address make_identity(const std::string& name, uint32_t transports, uint32_t rail_count);

// The same for an engine in a simulation: nothing in it tells of this machine or process.
Address make_identity_on(Simulation& simulation, uint32_t host, const std::string& name, uint32_t transports);

// What host_identity() is where the kernel does not show its boot id, as in some sandboxes: two that say so may be on
// one host or on two.
inline constexpr const char* kUnknownHost = "unknown-host";

// Identity of this host: the kernel's boot id, or kUnknownHost. Containers of one host share it. Throws TransportError
// when the system is too short of descriptors or memory to look.
const std::string& host_identity();

// Inode of the calling thread's network namespace, 0 when /proc does not tell.
uint64_t network_namespace();

}  // namespace crossrail
