// Which way private memory goes, by what was measured.
#include <doctest/doctest.h>

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

}  // namespace crossrail::shm
