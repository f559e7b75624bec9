// What explain() expects of a path: no rail counts for more than its own speed.
#include <doctest/doctest.h>

#include <vector>

#include "engine/path_speed.h"

namespace crossrail {

namespace {

Address with_rails(const std::vector<uint32_t>& speeds_mbps) {
  Address address;
  for (const uint32_t mbps : speeds_mbps) address.endpoints.push_back({.speed_mbps = mbps});
  return address;
}

double expected(const std::vector<RailReport>& pairs, const std::vector<uint32_t>& own,
                const std::vector<uint32_t>& peer) {
  return expected_gb_per_s(pairs, TransportKind::kTcp, with_rails(own), with_rails(peer));
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

TEST_CASE("one unknown speed makes all of it unknown") {
  CHECK(expected({{0, 0}, {1, 1}}, {8000, 0}, {8000, 8000}) == 0);
  CHECK(expected({{0, 0}, {1, 1}}, {8000, 8000}, {8000}) == 0);
  CHECK(expected({}, {8000}, {8000}) == 0);
}

}  // namespace crossrail
