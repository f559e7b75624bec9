#include <nanobind/nanobind.h>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "engine/traffic.h"

namespace crossrail::bindings {

namespace {

using Self = nb::pointer_and_handle<EngineHandle>;

nb::tuple to_tuple(const RailCounts& counts) {
  nb::list latencies;
  for (const uint64_t count : counts.latencies) latencies.append(count);
  return nb::make_tuple(counts.works, counts.bytes, counts.imms, counts.broken, counts.again,
                        static_cast<double>(counts.latency_sum_ns) * 1e-9, latencies);
}

nb::tuple traffic(Self self, double timeout_s) {
  const int64_t patience_ns = to_ns(timeout_s, "timeout_s", 1e9, 0, 1e6);
  const EngineRef engine = self.p->core();
  TrafficReport found;
  {
    WithoutGil no_gil;
    found = engine->traffic(patience_ns);
  }
  nb::list rails;
  for (const RailTrafficReport& rail : found.rails)
    rails.append(nb::make_tuple(rail.transport, rail.rail, to_tuple(rail.counts), rail.depth, rail.down));
  nb::list peers;
  for (const PeerTrafficReport& peer : found.peers) {
    nb::list paths;
    for (const PathExplanation& path : peer.paths) paths.append(nb::make_tuple(to_text(path.path), path.bytes));
    peers.append(nb::make_tuple(to_text(peer.peer), peer.transport, peer_state_name(peer.state), to_tuple(peer.counts),
                                peer.outstanding, peer.queued, peer.refused, peer.failed, paths));
  }
  nb::list bounds;
  for (uint32_t i = 0; i + 1 < kLatencyBuckets; ++i)
    bounds.append(static_cast<double>(uint64_t{1} << (kLatencyFirstBits + i)) * 1e-9);
  return nb::make_tuple(rails, peers, bounds, found.is_whole, found.hangs);
}

}  // namespace

void register_traffic(nb::class_<EngineHandle>& engine) {
  engine.def(
      "_traffic", &traffic, nb::arg("timeout_s"),
      nb::sig("def _traffic(self, timeout_s: float) -> tuple[list[tuple[str, int, tuple[int, int, int, int, int, "
              "float, list[int]], "
              "int, int]], list[tuple[str, str, str, tuple[int, int, int, int, int, float, list[int]], int, int, int, "
              "int, list[tuple[str, int]]]], list[float], bool, bool]"));
}

}  // namespace crossrail::bindings
