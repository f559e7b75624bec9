// Who this engine is.
#pragma once

#include <cstdint>
#include <string>

#include "transport/descriptor.h"

namespace crossrail {

// A fresh incarnation on this host. Throws TransportError when the kernel gives no random bytes.
Address make_address(TransportKind transport, const std::string& name, uint32_t rail_count);

// Identity of this host: the kernel's boot id. Containers of one host share it.
const std::string& host_identity();

}  // namespace crossrail
