#include <doctest/doctest.h>

#include <set>
#include <thread>

#include "engine/engine.h"
#include "engine/imm_table.h"
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
    notifier->drain(&cookies);
    REQUIRE(cookies.size() == 1);
  }
}

}  // namespace crossrail
