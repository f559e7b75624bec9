// Which way private memory goes, by what was measured.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>

#include "transport/shm/link.h"

namespace crossrail::shm {

namespace {

// What the trial of a path has seen once enough was moved at that rate.
void try_out(PrivateChoice::Trial& trial, double gb_per_s) {
  while (trial.bytes < kTrialBytes) {
    trial.add(kTrialWindowBytes, static_cast<int64_t>(static_cast<double>(kTrialWindowBytes) / gb_per_s));
  }
}

PrivateChoice staged_at(double gb_per_s) {
  PrivateChoice choice;
  try_out(choice.staged, gb_per_s);
  choice.tries_staged = false;
  return choice;
}

}  // namespace

TEST_CASE("shm: private memory goes staged until the rate of that is known, and then is attached to once") {
  PrivateChoice choice;
  CHECK_FALSE(choice.attaches(false));
  CHECK_FALSE(choice.attaches(true));

  choice = staged_at(8);

  CHECK(choice.attaches(false));
  CHECK(choice.attaches(true));
  CHECK_FALSE(choice.weigh());
}

TEST_CASE("shm: works that the kernel copies slowly go staged while the others are attached") {
  PrivateChoice choice = staged_at(8);
  try_out(choice.attaching[0].trial, 13);
  try_out(choice.attaching[1].trial, 1.4);

  CHECK(choice.weigh());

  CHECK(choice.attaches(false));
  CHECK_FALSE(choice.attaches(true));
  CHECK(choice.attaches());
}

TEST_CASE("shm: works that the kernel copies slowly do not decide about the others") {
  PrivateChoice choice = staged_at(8);
  try_out(choice.attaching[1].trial, 1.4);

  CHECK(choice.weigh());

  CHECK(choice.attaches(false));
  CHECK_FALSE(choice.attaches(true));
  CHECK_FALSE(choice.attaches());
  try_out(choice.attaching[0].trial, 13);
  CHECK(choice.weigh());
  CHECK(choice.attaches(false));
}

TEST_CASE("shm: where attaching is slower for all, works that are slower still do not try it") {
  PrivateChoice choice = staged_at(8);
  try_out(choice.attaching[0].trial, 4);

  CHECK(choice.weigh());

  CHECK_FALSE(choice.attaches(false));
  CHECK_FALSE(choice.attaches(true));
}

TEST_CASE(
    "shm: a wrong choice is found out once enough was moved by it, and a right one is asked about ever more seldom") {
  PrivateChoice choice = staged_at(2);  // its peer had no core just then
  try_out(choice.attaching[0].trial, 5);
  CHECK(choice.weigh());
  CHECK(choice.attaches());
  CHECK_FALSE(choice.is_outdated());

  const auto move = [&](uint64_t bytes) {
    if (choice.attaches(false)) {
      choice.attaching[0].trial.add(bytes, static_cast<int64_t>(bytes / 5));
    } else {
      choice.staged.add(bytes, static_cast<int64_t>(bytes / 8));
    }
  };
  const auto try_both = [&] {
    CHECK(choice.is_outdated());
    choice.try_again();
    CHECK_FALSE(choice.is_outdated());
    try_out(choice.staged, 8);
    choice.tries_staged = false;
    CHECK(choice.attaches(false));  // for now
    try_out(choice.attaching[0].trial, 5);
    CHECK(choice.weigh());
  };
  move(kTrustBytesMin);
  const uint64_t moved = choice.bytes();
  try_both();
  CHECK_FALSE(choice.attaches(false));
  CHECK_FALSE(choice.attaches());
  CHECK(choice.bytes() == moved + 2 * kTrialBytes);

  for (uint64_t trusted = kTrustBytesMin; trusted <= 2 * kTrustBytesMax; trusted = 2 * trusted) {
    const uint64_t left = std::min(trusted, kTrustBytesMax) - choice.trial_bytes();
    move(left - 1);
    CHECK_FALSE(choice.is_outdated());
    move(1);
    try_both();
    CHECK_FALSE(choice.attaches());
  }
}

TEST_CASE("shm: while both ways are tried again, what was found before is told") {
  PrivateChoice choice = staged_at(8);
  try_out(choice.attaching[0].trial, 13);
  CHECK(choice.weigh());
  choice.attaching[0].trial.add(kTrustBytesMin, 1'000'000'000);

  choice.try_again();

  CHECK_FALSE(choice.attaches(false));
  CHECK(choice.attaches());
  CHECK_FALSE(choice.has_only_short());
  try_out(choice.staged, 8);
  choice.tries_staged = false;
  CHECK(choice.attaches());
  CHECK_FALSE(choice.has_only_short());
  SUBCASE("it is the same again") {
    try_out(choice.attaching[0].trial, 13);
    CHECK(choice.weigh());
    CHECK(choice.attaches());
  }
  SUBCASE("the kernel refuses it from now on") {
    choice.settle(PrivateChoice::Way::kStaged, "");
    CHECK_FALSE(choice.attaches());
  }
}

TEST_CASE("shm: what was asked for is never tried again") {
  PrivateChoice choice;
  choice.settle(PrivateChoice::Way::kAttach, "");
  choice.attaching[0].trial.add(2 * kTrustBytesMax, 1'000'000'000);
  CHECK_FALSE(choice.is_outdated());
}

}  // namespace crossrail::shm
