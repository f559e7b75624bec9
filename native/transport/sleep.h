// One way of sleeping, whatever the transports are.
#pragma once

#include <span>

#include "transport/transport.h"

namespace crossrail {

// Sleeps until one of the transports is rung, or the deadline. May return early, without news. Any thread. What a sleeper
// must do before is said in transport.h.
void sleep_on(std::span<Transport* const> transports, Deadline deadline);

}  // namespace crossrail
