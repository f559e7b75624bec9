// What an engine knows about a peer, in the form that crossrail.peers.Explanation takes.
#pragma once

#include <nanobind/nanobind.h>

#include "engine/engine.h"

namespace crossrail::bindings {

// Engine::explain with the GIL released.
PeerExplanation explain_without_gil(Engine& engine, Peer& peer);

// The tuple that `Engine._explain` returns. Needs the GIL.
nanobind::tuple explanation_tuple(const PeerExplanation& found);

}  // namespace crossrail::bindings
