// What tests of moe proxies begin with: engines, and where the parts of a proxy's memory lie.
#pragma once

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "moe/proxy.h"

namespace crossrail::moe {

inline constexpr uint32_t kExperts = 256;
inline constexpr uint64_t kStrideBytes = 7392;  // 7168 of fp8, their scales, rounded up
inline constexpr uint64_t kYBytes = 14336;

inline EngineRef open_engine(const std::string& name, TransportKind kind = TransportKind::kShm,
                             Polling polling = Polling::kAdaptive) {
  EngineOptions options;
  options.name = name;
  options.transports = {kind};
  options.polling = polling;
  if (kind == TransportKind::kVerbs) options.rails = {"fake0"};  // of fake_verbs.h
  return Engine::open(options);
}

// Parts of memories that have room for `rows` rows of each kind.
inline FarMemory parts(uint32_t world, uint64_t rows, uint64_t stride_bytes, uint64_t y_bytes) {
  FarMemory memory{.route_bytes = kExperts * 4 + kFarewellBytes, .stride_bytes = stride_bytes, .y_bytes = y_bytes};
  const auto place = [](uint64_t& end, uint64_t bytes) { return std::exchange(end, end + bytes); };
  memory.routes_in = place(memory.routes_parity_bytes, world * memory.route_bytes);
  memory.routes_out = place(memory.routes_parity_bytes, memory.route_bytes);
  memory.rows_in = place(memory.rows_parity_bytes, rows * stride_bytes);
  memory.results_in = place(memory.rows_parity_bytes, rows * y_bytes);
  memory.rows_out = place(memory.rows_parity_bytes, rows * stride_bytes);
  memory.results_out = place(memory.rows_parity_bytes, rows * y_bytes);
  return memory;
}

inline FarRegions<RegionRef> alloc(Engine& engine, const FarMemory& memory, bool is_populated) {
  return {engine.alloc(kParities * memory.routes_parity_bytes, is_populated),
          engine.alloc(kParities * memory.rows_parity_bytes, is_populated)};
}

inline FarRegions<RemoteRegionRef> remote(Engine& engine, const FarRegions<RegionRef>& regions) {
  return {engine.remote_region(regions.routes->descriptor()), engine.remote_region(regions.rows->descriptor())};
}

inline std::vector<uint32_t> own_nodes(uint32_t world) {
  std::vector<uint32_t> nodes(world);
  std::iota(nodes.begin(), nodes.end(), 0u);
  return nodes;
}

// Ranks 0 and 1 of a layout, each with an engine and a proxy; they have met.
// Owner: the test closes the engines, in the order that it is about.
struct TwoRanks {
  TwoRanks(const Layout& layout, const FarMemory& memory)
      : engines{open_engine("a"), open_engine("b")},
        regions{alloc(*engines[0], memory, true), alloc(*engines[1], memory, true)},
        here(engines[0], layout, 0, memory, regions[0]),
        there(engines[1], layout, 1, memory, regions[1]) {
    here.connect(1, remote(*engines[0], regions[1]), there.imms_for(0));
    there.connect(0, remote(*engines[1], regions[0]), here.imms_for(1));
  }

  const EngineRef engines[2];
  const FarRegions<RegionRef> regions[2];
  Proxy here;
  Proxy there;
};

}  // namespace crossrail::moe
