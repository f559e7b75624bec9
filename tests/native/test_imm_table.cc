#include <doctest/doctest.h>

#include <atomic>
#include <set>
#include <thread>

#include "engine/engine.h"
#include "engine/imm_table.h"
#include "util/clock.h"
#include "util/errors.h"
#include "util/spinlock.h"

namespace crossrail {

namespace {

struct Table {
  EngineRef engine = [] {
    EngineOptions options;
    options.name = "counting";
    options.transports = {TransportKind::kNull};
    return Engine::open(options);
  }();
  ImmTable imms{100, kImmMax - 3};  // four numbers to give
};

}  // namespace

TEST_CASE("immediates: numbers are given once, and released ones only when no other is left, the oldest first") {
  Table table;
  std::set<uint32_t> given;
  for (int i = 0; i < 4; ++i) CHECK(given.insert(table.imms.allocate(table.engine.get())->imm()).second);
  CHECK_THROWS_AS(table.imms.allocate(table.engine.get()), UsageError);
  table.imms.release(kImmMax - 1, false);
  table.imms.release(kImmMax - 3, false);
  CHECK(table.imms.allocate(table.engine.get())->imm() == kImmMax - 1);
  CHECK(table.imms.allocate(table.engine.get())->imm() == kImmMax - 3);
  CHECK_THROWS_AS(table.imms.allocate(table.engine.get()), UsageError);
}

TEST_CASE("immediates: of very many released ones the oldest is given again, and their list stays bounded") {
  Table table;
  ImmTable imms(100, kImmMax - (1u << 21));
  const uint32_t first = imms.allocate(table.engine.get())->imm();
  imms.release(first, false);
  uint32_t turns = 0;
  for (bool is_given_again = false; !is_given_again; ++turns) {
    const uint32_t imm = imms.allocate(table.engine.get())->imm();
    is_given_again = imm == first;
    imms.release(imm, false);
    REQUIRE(turns <= 1u << 20);
  }
  CHECK(turns >= 1u << 20);
  CHECK(imms.allocate(table.engine.get())->imm() == first + 1);
}

TEST_CASE("immediates: a number for which something arrived after its release is not given again") {
  Table table;
  for (int i = 0; i < 4; ++i) table.imms.allocate(table.engine.get());
  table.imms.release(kImmMax, false);
  table.imms.release(kImmMax - 1, false);
  REQUIRE(table.imms.note_arrival(table.engine.get(), kImmMax, kUnitsPerCount));
  table.imms.flush_arrivals();

  CHECK(table.imms.allocate(table.engine.get())->imm() == kImmMax - 1);
  CHECK_THROWS_AS(table.imms.allocate(table.engine.get()), UsageError);
  table.imms.release(kImmMax, false);  // whoever looked after it says that it is quiet now
  const auto again = table.imms.allocate(table.engine.get());
  CHECK(again->imm() == kImmMax);
  CHECK(again->poll_units() == 0);
}

TEST_CASE("immediates: released twice, with an arrival in between, a number is still given to one only") {
  Table table;
  for (int i = 0; i < 4; ++i) table.imms.allocate(table.engine.get());
  table.imms.release(kImmMax, false);
  REQUIRE(table.imms.note_arrival(table.engine.get(), kImmMax, kUnitsPerCount));
  table.imms.flush_arrivals();
  table.imms.release(kImmMax, false);
  CHECK(table.imms.allocate(table.engine.get())->imm() == kImmMax);
  CHECK_THROWS_AS(table.imms.allocate(table.engine.get()), UsageError);
}

TEST_CASE("immediates: what is expected for certain is not released, unless forced") {
  Table table;
  const auto counter = table.imms.allocate(table.engine.get());
  REQUIRE(table.imms.note_arrival(table.engine.get(), counter->imm(), kUnitsPerCount / 4));
  table.imms.flush_arrivals();
  CHECK_THROWS_AS(table.imms.release(counter->imm(), false), UsageError);
  REQUIRE(table.imms.note_arrival(table.engine.get(), counter->imm(), kUnitsPerCount * 3 / 4));
  table.imms.flush_arrivals();
  table.imms.release(counter->imm(), false);  // whole counts that nobody took are the owner's to drop
  CHECK(counter->closed());
  const auto other = table.imms.allocate(table.engine.get());
  REQUIRE(table.imms.note_arrival(table.engine.get(), other->imm(), 1));
  table.imms.flush_arrivals();
  table.imms.release(other->imm(), true);
  CHECK(other->closed());
}

TEST_CASE("immediates: who was just served may give the number back at once") {
  Table table;
  const auto notifier = Ref<Notifier>::adopt(new Notifier);
  for (int i = 0; i < 3000; ++i) {
    const auto counter = table.imms.allocate(table.engine.get());
    counter->notify(1, notifier.get(), 7);
    std::atomic<bool> was_refused{false};
    std::thread user([&] {
      while (!notifier->has_posts()) cpu_relax();
      try {
        table.imms.release(counter->imm(), false);
      } catch (const UsageError&) {
        was_refused = true;
      }
    });
    counter->arrive(kUnitsPerCount);
    user.join();
    REQUIRE(!was_refused);
    std::vector<uint64_t> cookies;
    notifier->drain([&](uint64_t cookie) { cookies.push_back(cookie); });
    REQUIRE(cookies.size() == 1);
  }
}

TEST_CASE("immediates: between flags that come and go, waits and arrivals no count is lost or had twice") {
  Table table;
  const Ref<ImmCounter> counter = table.imms.allocate(table.engine.get());
  constexpr uint64_t kCountsMin = 200'000;
  constexpr uint32_t kFlagsWithSome = 20;  // so many had counts, however the threads' turns fall
  uint64_t arrived = 0;
  std::atomic<uint64_t> consumed{0};
  std::atomic<uint32_t> flags_with_some{0};
  std::atomic<bool> has_arrived{false};
  std::thread arrivals([&] {
    for (; arrived < kCountsMin || flags_with_some < kFlagsWithSome; ++arrived) {  // each in two parts
      counter->arrive(kUnitsPerCount / 3);
      counter->arrive(kUnitsPerCount - kUnitsPerCount / 3);
    }
    has_arrived = true;
  });
  std::thread waits([&] {
    while (!has_arrived) {
      if (counter->try_consume(2)) consumed += 2;
      if (counter->wait(3, now_ns() + 20'000, {}) == WaitResult::kReady) consumed += 3;
    }
  });
  while (!has_arrived) {
    const Ref<CountFlag> flag = counter->raise();
    for (int i = 0; i < 100; ++i) cpu_relax();
    counter->lower(flag.get());
    if (flag->given() > 0) ++flags_with_some;
    CHECK(flag->has_ended());
  }
  arrivals.join();
  waits.join();

  const Ref<CountFlag> last = counter->raise();
  CHECK(consumed + last->given() == arrived);  // what flags had and nobody took came back
  CHECK(counter->poll_units() == 0);
  counter->close();
  CHECK(last->has_ended());
  CHECK_THROWS_AS(counter->raise(), EngineClosedError);
}

}  // namespace crossrail
