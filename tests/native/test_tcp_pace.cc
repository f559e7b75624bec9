// How fast a channel is, by its own account.
#include <doctest/doctest.h>

#include "transport/tcp/pace.h"

using namespace crossrail::tcp;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int64_t kMs = 1'000'000;

}  // namespace

TEST_CASE("pace: measures while there is something ahead, and adds it up") {
  Pace pace;
  int64_t now = 7'000 * kMs;
  CHECK(pace.rate(now) == 0);
  pace.take(4 * kMiB, now);
  pace.take(4 * kMiB, now);
  CHECK(pace.ahead_bytes() == 8 * kMiB);

  pace.done(4 * kMiB, now += 10 * kMs);

  CHECK(pace.ahead_bytes() == 4 * kMiB);
  CHECK(pace.rate(now) == doctest::Approx(4.0 * kMiB / (10 * kMs)));
  CHECK(pace.ns_with(4 * kMiB) == doctest::Approx(20 * kMs));
}

TEST_CASE("pace: idle time does not count, short pieces do not, and what is old is forgotten") {
  Pace pace;
  int64_t now = 7'000 * kMs;
  pace.take(kMiB, now);
  pace.done(kMiB, now += kMs);  // too soon to say
  CHECK(pace.rate(now) == 0);
  pace.take(kMiB, now += 900 * kMs);
  pace.take(kPacedBytes - 1, now);
  CHECK(pace.ahead_bytes() == kMiB);

  pace.done(kMiB, now += 10 * kMs);

  CHECK(pace.rate(now) == doctest::Approx(1.0 * kMiB / (10 * kMs)));
  CHECK(pace.rate(now + 999 * kMs) != 0);
  CHECK(pace.rate(now + 1'001 * kMs) == 0);
}

TEST_CASE("pace: what goes elsewhere is not ahead, and its late end takes nothing below zero") {
  Pace pace;
  pace.take(4 * kMiB, 1);
  pace.drop();
  pace.done(4 * kMiB, 2);

  CHECK(pace.ahead_bytes() == 0);
}
