// What explain() expects of a path: no rail counts for more than its own speed.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "engine/path_speed.h"

namespace crossrail {

namespace {

Address with_rails(const std::vector<uint32_t>& speeds_mbps) {
  Address address;
  for (const uint32_t mbps : speeds_mbps) {
    Endpoint& endpoint = address.endpoints.emplace_back();
    endpoint.speed_mbps = mbps;
    endpoint.ip[0] = static_cast<uint8_t>(address.endpoints.size());
  }
  return address;
}

double expected(const std::vector<RailReport>& pairs, const std::vector<uint32_t>& own,
                const std::vector<uint32_t>& peer, const std::vector<std::string>& devices = {}) {
  return expected_gb_per_s(pairs, TransportKind::kTcp, with_rails(own), devices, with_rails(peer));
}

}  // namespace

TEST_CASE("rails in pairs of their own add up to the slower ends") {
  CHECK(expected({{0, 0}, {1, 1}}, {8000, 8000}, {8000, 4000}) == doctest::Approx(1.5));
}

TEST_CASE("a rail that several pairs share counts once") {
  CHECK(expected({{0, 0}, {1, 0}, {2, 0}}, {8000, 8000, 8000}, {8000}) == doctest::Approx(1.0));
  CHECK(expected({{0, 0}, {0, 1}, {0, 2}}, {8000}, {8000, 8000, 8000}) == doctest::Approx(1.0));
  CHECK(expected({{0, 0}, {1, 0}, {2, 1}}, {8000, 8000, 8000}, {8000, 32000}) == doctest::Approx(2.0));
}

TEST_CASE("rails on one interface share its speed") {
  const std::vector<RailReport> pairs = {{0, 0}, {1, 1}};
  CHECK(expected(pairs, {8000, 8000}, {8000, 8000}, {"eth0", "eth0"}) == doctest::Approx(1.0));
  CHECK(expected(pairs, {8000, 8000}, {8000, 8000}, {"eth0", "eth1"}) == doctest::Approx(2.0));
  CHECK(expected({{0, 0}, {1, 0}}, {8000, 8000}, {32000}, {"eth0", "eth0"}) == doctest::Approx(1.0));
  CHECK(expected({{0, 0}, {1, 0}, {2, 0}}, {8000, 8000, 8000}, {32000}, {"a", "b", "a"}) == doctest::Approx(2.0));
  CHECK(expected({{0, 0}, {1, 1}}, {8000, 8000}, {8000, 8000}, {"eth0"}) == doctest::Approx(2.0));

  Address peer = with_rails({8000, 8000});
  peer.endpoints[1].ip = peer.endpoints[0].ip;  // another port
  CHECK(expected_gb_per_s(pairs, TransportKind::kTcp, with_rails({8000, 8000}), {}, peer) == doctest::Approx(1.0));
}

TEST_CASE("one unknown speed makes all of it unknown") {
  CHECK(expected({{0, 0}, {1, 1}}, {8000, 0}, {8000, 8000}) == 0);
  CHECK(expected({{0, 0}, {1, 1}}, {8000, 8000}, {8000}) == 0);
  CHECK(expected({}, {8000}, {8000}) == 0);
}

}  // namespace crossrail
