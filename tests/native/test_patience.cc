// How long one spins before a sleep, after sleeps that were too short.
#include <doctest/doctest.h>

#include "engine/waiting.h"

namespace crossrail {

TEST_CASE("who wakes at once spins for longer, until a sleep was worth it") {
  Patience patience(1000);
  CHECK(patience.spin_ns() == 1000);
  for (const int64_t spin_ns : {2000, 4000, 8000, 16000, 16000}) {
    CHECK(patience.note_sleep(499));
    CHECK(patience.spin_ns() == spin_ns);
  }
  CHECK_FALSE(patience.note_sleep(500));
  CHECK(patience.spin_ns() == 1000);
}

TEST_CASE("who never sleeps since news come while he spins, tries to after a while") {
  Patience patience(1000);
  for (int i = 0; i < 4; ++i) patience.note_sleep(0);
  int spins = 0;
  while (patience.spin_ns() > 1000 && spins < 1000) ++spins;
  CHECK(spins > 4);
  CHECK(spins < 1000);
}

TEST_CASE("who is not to spin does not") {
  Patience patience(0);
  CHECK_FALSE(patience.note_sleep(0));
  CHECK(patience.spin_ns() == 0);
}

}  // namespace crossrail
