// What an engine knows about a peer, in the form that crossrail.peers.Explanation takes.
#pragma once

#include <nanobind/nanobind.h>

#include "engine/engine.h"

namespace crossrail::bindings {

// The tuple that `Engine._explain` returns. Needs the GIL.
nanobind::tuple explanation_tuple(const PeerExplanation& found);

}  // namespace crossrail::bindings
