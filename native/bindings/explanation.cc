#include "bindings/explanation.h"

#include "bindings/convert.h"

namespace crossrail::bindings {

PeerExplanation explain_without_gil(Engine& engine, Peer& peer) {
  const WithoutGil no_gil;
  return engine.explain(peer);
}

nb::tuple explanation_tuple(const PeerExplanation& found) {
  nb::list rails;
  nb::list endpoints;
  for (const RailExplanation& rail : found.rails) {
    rails.append(nb::make_tuple(rail.rail, rail.peer_rail));
    if (!rail.endpoint.empty()) endpoints.append(nb::make_tuple(to_text(rail.endpoint), to_text(rail.peer_endpoint)));
  }
  nb::list paths;
  for (const PathExplanation& path : found.paths) {
    paths.append(
        nb::make_tuple(to_text(path.what), to_text(path.path), to_text(path.reason), path.gb_per_s, path.bytes));
  }
  const auto seconds = [](int64_t ns) { return static_cast<double>(ns) * 1e-9; };
  const Heartbeat& beat = found.heartbeat;
  nb::object heartbeat = nb::none();
  if (beat.answered > 0) {
    heartbeat = nb::make_tuple(beat.answered, seconds(beat.rtt_ns), seconds(beat.rtt_smooth_ns),
                               seconds(beat.rtt_min_ns), seconds(beat.rtt_max_ns));
  }
  return nb::make_tuple(to_text(found.peer), to_text(found.transport), to_text(found.reason),
                        peer_state_name(found.state), to_text(found.note), rails, endpoints, found.gb_per_s_expected,
                        paths, heartbeat);
}

}  // namespace crossrail::bindings
