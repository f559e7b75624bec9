// Which transport reaches a peer, by addresses alone, and what rails= means to each of several.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "engine/rail_names.h"
#include "engine/routes.h"
#include "transport/identity.h"
#include "util/errors.h"

namespace crossrail {

namespace {

constexpr uint32_t kShm = transport_bit(TransportKind::kShm);
constexpr uint32_t kTcp = transport_bit(TransportKind::kTcp);
constexpr uint32_t kVerbs = transport_bit(TransportKind::kVerbs);
constexpr uint32_t kOfi = transport_bit(TransportKind::kOfi);
constexpr uint32_t kAuto = kShm | kTcp;

const WhyOutOfReach kNear = [](TransportKind) { return std::string(); };

Address engine(uint32_t transports, const char* host = "here", const char* fabric = "efa") {
  Address address;
  address.transports = transports;
  address.name = "e";
  address.host = host;
  if ((transports & kTcp) != 0) address.endpoints = {{.ip = {10, 0, 0, 1}, .port = 1}};
  if ((transports & kVerbs) != 0) address.rdma_on(TransportKind::kVerbs).endpoints = {{.bytes = {1}}};
  if ((transports & kOfi) != 0) address.rdma_on(TransportKind::kOfi) = {fabric, {{.bytes = {1}}}};
  return address;
}

std::string route(const Address& own, const Address& peer, const std::vector<Absent>& absent = {},
                  const WhyOutOfReach& reach = kNear) {
  const ChosenTransport chosen = choose_transport(own, peer, absent, reach);
  return std::string(transport_name(chosen.kind)) + ": " + chosen.reason;
}

std::string refusal(const Address& own, const Address& peer) {
  try {
    return "not refused: " + route(own, peer);
  } catch (const UsageError& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

RdmaPort port(const char* device, const char* netdev, const char* ip) {
  return {std::string(device) + ":1", device, netdev, ip, "", false};
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("the fastest transport that both have is taken") {
  const Address all = engine(kAuto | kVerbs);
  CHECK(route(all, engine(kAuto | kVerbs)) == "shm: same host: shared memory");
  CHECK(route(all, engine(kAuto | kVerbs, "there")) == "verbs: it is on another host");
  CHECK(route(engine(kAuto | kOfi), engine(kAuto | kOfi, "there")) == "ofi: it is on another host");
  CHECK(route(engine(kAuto | kVerbs | kOfi), engine(kAuto | kVerbs | kOfi, "there")) == "verbs: it is on another host");
  CHECK(route(engine(kAuto), engine(kAuto, "there")) == "tcp: it is on another host");
  CHECK(route(all, engine(kVerbs)) == "verbs: the peer has no shm: it asked for verbs");
  CHECK(route(engine(kVerbs), engine(kVerbs)) == "verbs: requested by transport='verbs'");
  CHECK(route(engine(kOfi, "here", "tcp"), engine(kOfi, "here", "tcp")) == "ofi: requested by transport='ofi:tcp'");
}

TEST_CASE("a peer of this host whose memory we are not let into is reached as if it were on another") {
  const WhyOutOfReach foreign = [](TransportKind kind) { return kind == TransportKind::kShm ? "it is not ours" : ""; };
  CHECK(route(engine(kAuto), engine(kAuto), {}, foreign) == "tcp: it is on this host; no shm: it is not ours");
  CHECK(route(engine(kAuto), engine(kShm), {}, foreign) == "shm: same host, but it is not ours");  // it says so again
  CHECK(route(engine(kAuto), engine(kAuto, "there"), {}, foreign) == "tcp: it is on another host");
}

TEST_CASE("hosts that cannot be told apart are not said to be one") {
  const WhyOutOfReach nobody = [](TransportKind kind) { return kind == TransportKind::kShm ? "nobody is there" : ""; };
  const Address hidden = engine(kAuto, kUnknownHost);
  CHECK(route(hidden, hidden, {}, nobody) == "tcp: it is perhaps on this host; no shm: nobody is there");
  CHECK(route(hidden, hidden) == "shm: same host: shared memory");
}

TEST_CASE("what stood in the way of a faster transport is said") {
  const Address peer = engine(kAuto | kVerbs, "there");
  CHECK(route(engine(kAuto), peer) == "tcp: it is on another host; it has verbs, this engine does not");
  CHECK(route(engine(kAuto), peer, {{TransportKind::kVerbs, "no device"}}) ==
        "tcp: it is on another host; it has verbs, this engine does not: no device");
  CHECK(route(engine(kAuto | kVerbs), engine(kAuto, "there")) == "tcp: it is on another host; it has no verbs");
  CHECK(route(engine(kAuto | kVerbs), engine(kAuto | kOfi, "there")) ==
        "tcp: it is on another host; it has no verbs; it has ofi, this engine does not");
  CHECK(route(engine(kAuto | kOfi), engine(kAuto | kOfi, "there", "tcp")) ==
        "tcp: it is on another host; its ofi is on another network: 'tcp', ours 'efa'");
  const WhyOutOfReach far = [](TransportKind kind) {
    return std::string(transport_name(kind)) + ": InfiniBand there, Ethernet here";
  };
  CHECK(route(engine(kAuto | kVerbs), peer, {}, far) ==
        "tcp: it is on another host; verbs: InfiniBand there, Ethernet here");
}

TEST_CASE("without a way between the two, both sides and the obstacles are named") {
  const std::string none = refusal(engine(kVerbs), engine(kAuto, "there"));
  CHECK(contains(none, "this engine has transport verbs, the peer shm and tcp; it has no verbs"));
  CHECK(contains(none, "Open both with the same transport"));
  const std::string fabrics = refusal(engine(kOfi), engine(kOfi, "there", "tcp"));
  CHECK(contains(fabrics, "its ofi is on another network: 'tcp', ours 'efa'"));
  CHECK(contains(refusal(engine(kShm), engine(kAuto | kVerbs, "there")), "where shm does not reach"));
}

TEST_CASE("each transport takes those of the named rails that mean something to it") {
  const std::vector<RdmaPort> ports = {port("mlx5_0", "eth0", "10.0.0.1"), port("mlx5_1", "eth1", "10.0.1.1"),
                                       port("ib0", "", "")};
  const auto split = [&](const Names& names) { return split_rail_names(names, ports); };
  CHECK(split({"mlx5_0", "mlx5_1:1"}).rdma == Names{"mlx5_0", "mlx5_1:1"});
  CHECK(split({"mlx5_0", "mlx5_1:1"}).tcp == Names{"eth0", "eth1"});
  CHECK(split({"eth0", "10.0.1.1"}).rdma == Names{"eth0", "10.0.1.1"});
  CHECK(split({"eth0", "10.0.1.1"}).tcp == Names{"eth0", "10.0.1.1"});
  CHECK(split({"eth7"}).rdma.empty());
  CHECK(split({"eth7"}).tcp == Names{"eth7"});
  CHECK(split({"ib0"}).rdma == Names{"ib0"});
  CHECK(split({"ib0"}).tcp.empty());
  CHECK(split({}).tcp.empty());
}

}  // namespace crossrail
