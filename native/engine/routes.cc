#include "engine/routes.h"

#include <algorithm>

#include "transport/identity.h"
#include "util/errors.h"

namespace crossrail {

namespace {

constexpr TransportKind kBetweenHosts[] = {TransportKind::kVerbs, TransportKind::kOfi, TransportKind::kTcp,
                                           TransportKind::kSim, TransportKind::kNull};

const char* place_of(const Address& own, const Address& peer) {
  if (same_host(own, peer)) return own.host == kUnknownHost ? "perhaps on this host" : "on this host";
  if (own.host == peer.host) return "in another network namespace of this host";
  if (own.host == kUnknownHost) return "on an unknown host (this process cannot read its own boot id in /proc)";
  if (peer.host == kUnknownHost) return "on an unknown host (it cannot read its boot id in /proc)";
  return "on another host";
}

// As spelled in transport=: "tcp", "ofi:tcp".
std::string asked_for(const Address& own, TransportKind kind) {
  const std::string fabric = is_rdma(kind) && kind != TransportKind::kSim ? own.rdma_on(kind).fabric : "";
  return std::string(transport_name(kind)) + (fabric.empty() ? "" : ":" + fabric);
}

std::string quoted(const std::string& fabric) { return fabric.empty() ? "unnamed" : "'" + fabric + "'"; }

// Why a transport that at least one side has is not used; empty: it can be.
std::string obstacle(TransportKind kind, const Address& own, const Address& peer, std::span<const Absent> absent,
                     const WhyOutOfReach& why_out_of_reach) {
  const std::string name = transport_name(kind);
  if (!own.has(kind)) {
    const auto found = std::ranges::find(absent, kind, &Absent::kind);
    return "it has " + name + ", this engine does not" + (found == absent.end() ? "" : ": " + found->reason);
  }
  if (!peer.has(kind)) return "it has no " + name;
  if (!is_rdma(kind)) return {};
  const std::string& here = own.rdma_on(kind).fabric;
  const std::string& there = peer.rdma_on(kind).fabric;
  if (here != there && kind == TransportKind::kSim) return "it is in another simulated world, or of another process";
  if (here != there) return "its " + name + " is on another network: " + quoted(there) + ", ours " + quoted(here);
  return why_out_of_reach(kind);
}

// Between hosts. `better`: what rules out the transports that are preferred to this one.
std::string reason_for(TransportKind kind, const Address& own, const Address& peer, const std::string& better) {
  if ((own.transports & (own.transports - 1)) == 0) return "requested by transport='" + asked_for(own, kind) + "'";
  if (kind == TransportKind::kNull) return "requested by transport='null'";
  const bool is_near = same_host(own, peer);
  return (is_near && !peer.has(TransportKind::kShm) ? "the peer has no shm: it asked for " + asked_for(peer, kind)
                                                    : std::string("it is ") + place_of(own, peer)) +
         better;
}

[[noreturn]] void refuse(const Address& own, const Address& peer, const std::string& obstacles) {
  const std::string sides = "this engine has transport " + transport_names(own.transports) + ", the peer " +
                            transport_names(peer.transports) + obstacles;
  if (same_host(own, peer) || !own.has(TransportKind::kShm)) {
    throw UsageError("peer '" + peer.name + "' cannot be reached: " + sides + ". Open both with the same transport");
  }
  throw UsageError("peer '" + peer.name + "' is " + place_of(own, peer) + ", where shm does not reach: " + sides +
                   ". Open both with transport 'tcp' or 'auto'");
}

}  // namespace

ChosenTransport choose_transport(const Address& own, const Address& peer, std::span<const Absent> absent,
                                 const WhyOutOfReach& why_out_of_reach) {
  const uint32_t shared = own.transports & peer.transports;
  std::string obstacles;
  if ((shared & transport_bit(TransportKind::kShm)) != 0 && same_host(own, peer)) {
    const std::string found = why_out_of_reach(TransportKind::kShm);
    if (found.empty()) return {TransportKind::kShm, "same host: shared memory"};
    if (shared == transport_bit(TransportKind::kShm)) return {TransportKind::kShm, "same host, but " + found};
    obstacles = "; no shm: " + found;
  }
  for (const TransportKind kind : kBetweenHosts) {
    if (!own.has(kind) && !peer.has(kind)) continue;
    const std::string found = obstacle(kind, own, peer, absent, why_out_of_reach);
    if (found.empty()) return {kind, reason_for(kind, own, peer, obstacles)};
    if (is_rdma(kind)) obstacles += "; " + found;
  }
  refuse(own, peer, obstacles);
}

}  // namespace crossrail
