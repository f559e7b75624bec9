// How a packet gets from one of our ports to an endpoint.
#pragma once

#include "transport/verbs/adapter.h"
#include "transport/verbs/wire.h"

namespace crossrail::verbs {

ibv_ah_attr route_to(const Adapter& adapter, const Endpoint& endpoint);

}  // namespace crossrail::verbs
