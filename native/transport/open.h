// The one switch from kind to implementation.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace crossrail {

// `sink` must outlive the transport. Throws TransportError.
std::unique_ptr<Transport> open_transport(TransportKind kind, const TransportOptions& options, Sink* sink);

}  // namespace crossrail
