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

// The same for an engine in a simulation: reveals nothing about this machine or process.
Address make_identity_on(Simulation& simulation, uint32_t host, const std::string& name, uint32_t transports);

// The value of host_identity() where the kernel does not show its boot id, as in some sandboxes. Two engines with this
// value may or may not be on one host.
inline constexpr const char* kUnknownHost = "unknown-host";

// Identity of this host: the kernel's boot id, or kUnknownHost. Containers on one host share it. Throws TransportError
// if the process has too few descriptors or too little memory to find out.
const std::string& host_identity();

// Inode of the calling thread's network namespace, 0 when /proc does not tell.
uint64_t network_namespace();

}  // namespace crossrail
