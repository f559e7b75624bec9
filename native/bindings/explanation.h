// What an engine knows of a peer, as crossrail.peers.Explanation takes it.
#pragma once

#include <nanobind/nanobind.h>

#include "engine/engine.h"

namespace crossrail::bindings {

// The tuple that `Engine._explain` returns. Needs the GIL.
nanobind::tuple explanation_tuple(const PeerExplanation& found);

}  // namespace crossrail::bindings
