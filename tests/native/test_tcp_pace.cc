// How fast a channel is, by its own account, and which of several takes on what waits.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>

#include "transport/tcp/pace.h"

using namespace crossrail::tcp;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int64_t kMs = 1'000'000;

// One that has moved so many bytes per millisecond twice, until `now`.
Pace measured(uint64_t bytes_per_ms, int64_t now, int64_t round_trip_ns = 0) {
  Pace pace;
  pace.begin(round_trip_ns);
  for (int i = 2; i > 0; --i) {
    pace.take(10 * bytes_per_ms, now - i * (10 * kMs + round_trip_ns));
    pace.done(10 * bytes_per_ms, now - (i - 1) * (10 * kMs + round_trip_ns));
  }
  return pace;
}

}  // namespace

TEST_CASE("pace: measures while there is something ahead, and adds it up") {
  Pace pace;
  int64_t now = 7'000 * kMs;
  CHECK(pace.rate(now) == 0);
  CHECK_FALSE(pace.is_known());
  pace.take(4 * kMiB, now);
  pace.take(8 * kMiB, now);
  CHECK(pace.ahead_bytes() == 12 * kMiB);
  CHECK(pace.done(4 * kMiB, now += 10 * kMs));
  CHECK(pace.done(4 * kMiB, now += 10 * kMs));

  CHECK(pace.ahead_bytes() == 4 * kMiB);
  CHECK(pace.rate(now) == doctest::Approx(4.0 * kMiB / (10 * kMs)));
  CHECK(pace.done(4 * kMiB, now += 20 * kMs));
  CHECK(pace.rate(now) == doctest::Approx(3.0 * kMiB / (10 * kMs)));
}

TEST_CASE("pace: the first measure of a connection counts for nothing") {
  Pace pace;
  int64_t now = 7'000 * kMs;
  pace.take(kMiB, now);
  CHECK(pace.done(kMiB, now += 1500 * kMs));  // it was lost, and sent again
  CHECK_FALSE(pace.is_known());
  CHECK(pace.rate(now) == 0);
  pace.take(kMiB, now);
  CHECK(pace.done(kMiB, now += 10 * kMs));

  CHECK(pace.is_known());
  CHECK(pace.rate(now) == doctest::Approx(0.1 * kMiB / kMs));
}

TEST_CASE("pace: of several short times it is measured as of one, without the idle times between") {
  Pace pace;
  int64_t now = 7'000 * kMs;
  for (int i = 0; i < 6; ++i) {  // three for each measure
    CHECK_FALSE(pace.is_known());
    pace.take(kMiB, now += 900 * kMs);
    pace.done(kMiB, now += 2 * kMs);
  }
  CHECK(pace.rate(now) == doctest::Approx(0.5 * kMiB / kMs));
}

TEST_CASE("pace: acknowledgements that come together are no great speed") {
  int64_t now = 7'000 * kMs;
  Pace pace = measured(kMiB / 10, now);
  pace.take(4 * kMiB, now);
  pace.done(3 * kMiB, now += 40 * kMs);
  pace.done(kMiB, now);

  CHECK(pace.rate(now) == doctest::Approx(0.1 * kMiB / kMs));
}

TEST_CASE("pace: however many bytes are acknowledged together, they took the time that passed") {
  int64_t now = 7'000 * kMs;
  Pace pace = measured(kMiB / 10, now);
  pace.take(64 * kMiB, now);
  now += 640 * kMs;
  CHECK(pace.done(8 * kMiB, now));
  for (int i = 0; i < 7; ++i) CHECK_FALSE(pace.done(8 * kMiB, now += 1'000));

  CHECK(pace.ahead_bytes() == 0);
  CHECK(pace.rate(now) == doctest::Approx(0.1 * kMiB / kMs).epsilon(0.001));
  pace.take(8 * kMiB, now);
  CHECK(pace.done(8 * kMiB, now += 80 * kMs));
  CHECK(pace.rate(now) == doctest::Approx(0.1 * kMiB / kMs).epsilon(0.001));
}

TEST_CASE("pace: a round trip is not time that bytes take") {
  int64_t now = 7'000 * kMs;
  const Pace pace = measured(kMiB / 10, now, 50 * kMs);

  CHECK(pace.rate(now) == doctest::Approx(0.1 * kMiB / kMs));
}

TEST_CASE("pace: what does not come to an end bounds the rate") {
  Pace pace;
  int64_t now = 7'000 * kMs;
  pace.take(kMiB, now);
  CHECK(pace.rate(now + 4 * kMs) == 0);
  CHECK(pace.rate(now + 100 * kMs) == doctest::Approx(0.01 * kMiB / kMs));
  pace = measured(kMiB / 10, now);
  pace.take(kMiB, now += kMs);

  CHECK(pace.rate(now + kMs) == doctest::Approx(0.1 * kMiB / kMs));
  CHECK(pace.rate(now + 1000 * kMs) == doctest::Approx(0.001 * kMiB / kMs));
}

TEST_CASE("pace: one that was slow is tried again, for a twentieth of the time") {
  int64_t now = 7'000 * kMs;
  Pace pace;
  for (int i = 0; i < 2; ++i) {
    pace.take(kMiB, now);
    pace.done(kMiB, now += 1000 * kMs);
  }

  CHECK_FALSE(pace.is_to_be_tried(kMiB, now + 19'990 * kMs));
  CHECK(pace.is_to_be_tried(kMiB, now + 20'100 * kMs));
  CHECK_FALSE(pace.is_to_be_tried(64 * kMiB, now + 29'999 * kMs));
  CHECK(pace.is_to_be_tried(64 * kMiB, now + 30'001 * kMs));
  CHECK_FALSE(pace.is_to_be_tried(kMiB / 64, now + 999 * kMs));
  CHECK(pace.is_to_be_tried(kMiB / 64, now + 1'001 * kMs));
  pace.take(1, now);
  CHECK_FALSE(pace.is_to_be_tried(kMiB, now + 20'100 * kMs));
}

TEST_CASE("pace: what an earlier connection carried tells nothing of this one") {
  Pace pace;
  pace.begin(kMs);
  pace.done(4 * kMiB, 70'000'000 * kMs);

  CHECK_FALSE(pace.is_known());
}

TEST_CASE("pace: operations that are few and short make no rail slow") {
  int64_t now = 7'000 * kMs;
  Pace pace = measured(kMiB / 10, now);
  for (int i = 0; i < 1000; ++i) {
    pace.take(paced_bytes(0), now += kMs);
    pace.done(paced_bytes(0), now += kMs);
  }

  CHECK(pace.rate(now) == doctest::Approx(0.1 * kMiB / kMs));
}

TEST_CASE("pace: what goes elsewhere is not ahead, and its late end takes nothing below zero") {
  Pace pace;
  pace.take(4 * kMiB, 1);
  pace.drop();
  pace.done(4 * kMiB, 2);

  CHECK(pace.ahead_bytes() == 0);
}

TEST_CASE("shares: all are done at the same time, but for those that take longer anyway") {
  const std::array alike{Load{1, 0}, Load{1, 0}, Load{1, 0}};
  for (size_t self = 0; self < 3; ++self) CHECK(fair_share(alike, self, 300) == doctest::Approx(100));
  const std::array unlike{Load{1, 0}, Load{9, 0}};
  CHECK(fair_share(unlike, 0, 1000) == doctest::Approx(100));
  CHECK(fair_share(unlike, 1, 1000) == doctest::Approx(900));
  const std::array ahead{Load{1, 50}, Load{1, 0}, Load{1, 1000}};
  CHECK(fair_share(ahead, 0, 100) == doctest::Approx(25));
  CHECK(fair_share(ahead, 1, 100) == doctest::Approx(75));
  CHECK(fair_share(ahead, 2, 100) < 0);
  const std::array one{Load{2, 10}};
  CHECK(fair_share(one, 0, 100) == doctest::Approx(100));
  CHECK(fair_share(ahead, 1, 0) <= 0);
}

TEST_CASE("shares: the first to be done is the one that would be, or any of several") {
  const std::array loads{Load{1, 0}, Load{10, 95}, Load{10, 95}};
  CHECK(would_be_first(loads, 0, 10));
  CHECK_FALSE(would_be_first(loads, 1, 10));
  CHECK_FALSE(would_be_first(loads, 0, 20));
  CHECK(would_be_first(loads, 1, 20));
  CHECK(would_be_first(loads, 2, 20));
}

TEST_CASE("shares: pieces that each go to whom the rules name are done nearly as soon as can be") {
  for (const double slow : {0.01, 0.05, 0.3, 1.0}) {
    for (const double piece : {1.0, 7.0}) {
      std::array loads{Load{slow, 0}, Load{1, 0}, Load{1, 0}};
      double waiting = 700;
      for (int guard = 0; waiting > 0 && guard < 10'000; ++guard) {
        for (size_t self = 0; self < loads.size() && waiting > 0; ++self) {
          const double share = fair_share(loads, self, waiting);
          double taken = 0;
          while (waiting > 0 && (taken + piece <= share || would_be_first(loads, self, piece))) {
            taken += piece;
            waiting -= piece;
            loads[self].ahead_bytes += piece;
          }
        }
      }
      CHECK(waiting <= 0);
      double last = 0;
      for (const Load& load : loads) last = std::max(last, load.ns_with(0));
      CHECK(last <= 700 / (2 + slow) + piece / slow * 0.1 + 2 * piece);
    }
  }
}
