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

// Parts of a memory that has room for `rows` rows of each kind.
inline FarMemory parts(uint32_t world, uint64_t rows, uint64_t stride_bytes, uint64_t y_bytes) {
  FarMemory memory{.route_bytes = kExperts * 4, .stride_bytes = stride_bytes, .y_bytes = y_bytes};
  uint64_t end = 0;
  const auto place = [&](uint64_t bytes) { return std::exchange(end, end + bytes); };
  memory.routes_in = place(world * memory.route_bytes);
  memory.rows_in = place(rows * stride_bytes);
  memory.results_in = place(rows * y_bytes);
  memory.routes_out = place(memory.route_bytes);
  memory.rows_out = place(rows * stride_bytes);
  memory.results_out = place(rows * y_bytes);
  memory.parity_bytes = end;
  return memory;
}

inline std::vector<uint32_t> own_nodes(uint32_t world) {
  std::vector<uint32_t> nodes(world);
  std::iota(nodes.begin(), nodes.end(), 0u);
  return nodes;
}

}  // namespace crossrail::moe
