// Several transports in one engine: which one reaches whom, sleeping on all of them, one id for a region in all.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/transports.h"
#include "transport/identity.h"
#include "util/clock.h"
#include "util/errors.h"
#include "util/wake_event.h"

namespace crossrail {

namespace {

constexpr uint32_t kShm = transport_bit(TransportKind::kShm);
constexpr uint32_t kNull = transport_bit(TransportKind::kNull);
constexpr uint32_t kTcp = transport_bit(TransportKind::kTcp);

class QuietSink final : public Sink {
 public:
  void on_retired(Link&, void*, uint32_t, uint32_t, uint64_t, Status, const std::string&) override {}
  void on_withdrawn(Link&, void*, uint32_t, uint64_t) override {}
  void on_imm(uint32_t, uint64_t) override {}
  Offer on_message(const std::shared_ptr<const Address>&, std::span<const uint8_t>) override { return Offer::kTaken; }
  void on_service(const std::shared_ptr<const Address>&, std::span<const uint8_t>) override {}
  void on_link_up(Link&) override {}
  void on_link_down(Link&, const std::string&, LinkEnd) override {}
  void on_link_frozen(Link&, bool, const std::string&) override {}
  void on_protocol_error(const std::string&, const std::string&) override {}
};

EngineOptions options_with(std::vector<TransportKind> transports, uint32_t rails = 1) {
  EngineOptions options;
  options.name = "many";
  options.transports = std::move(transports);
  options.rail_count = rails;
  return options;
}

struct Set {
  explicit Set(std::vector<TransportKind> transports, uint32_t rails = 1)
      : transports(options_with(std::move(transports), rails), {}, &sink) {}
  ~Set() { transports.close(); }
  QuietSink sink;
  TransportSet transports;
};

Address peer_with(uint32_t transports) {
  Address address = make_identity("peer", transports, 1);
  if ((transports & kTcp) != 0) address.endpoints = {{.ip = {10, 0, 0, 1}, .port = 1}};
  return address;
}

std::string refusal(const TransportSet& transports, const Address& peer) {
  try {
    (void)transports.choose(peer);
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

}  // namespace

TEST_CASE("the transport is chosen per peer") {
  Set both({TransportKind::kNull, TransportKind::kShm});
  CHECK(both.transports.kind_at(0) == TransportKind::kShm);
  CHECK(both.transports.address().transports == (kShm | kNull));

  const Route near = both.transports.choose(peer_with(kShm | kTcp));
  CHECK(near.kind == TransportKind::kShm);
  CHECK(near.transport == &both.transports.at(0));
  CHECK(near.reason == "same host: shared memory");
  CHECK(both.transports.choose(peer_with(kShm | kNull)).kind == TransportKind::kShm);
  const Route other = both.transports.choose(peer_with(kNull));
  CHECK(other.kind == TransportKind::kNull);
  CHECK(other.transport == &both.transports.at(1));
  CHECK(other.index == 1);
  CHECK(other.reason == "requested by transport='null'");
}

TEST_CASE("a peer that cannot be reached is refused with what both sides have") {
  Set shm({TransportKind::kShm});
  const std::string other_kind = refusal(shm.transports, peer_with(kTcp));
  CHECK(contains(other_kind, "this engine has transport shm, the peer tcp"));
  CHECK(contains(other_kind, "Open both with the same transport"));
  Address far = peer_with(kShm | kTcp);
  far.host = "elsewhere";
  const std::string other_host = refusal(shm.transports, far);
  CHECK(contains(other_host, "on another host"));
  CHECK(contains(other_host, "the peer shm and tcp"));
  CHECK(contains(other_host, "'tcp' or 'auto'"));
  Address boxed = peer_with(kShm);
  boxed.net += 1;
  CHECK(contains(refusal(shm.transports, boxed), "another network namespace of this host"));
}

TEST_CASE("a transport that this build lacks, or one named twice, is refused") {
  QuietSink sink;
  CHECK_THROWS_AS(Engine::open(options_with({TransportKind::kShm, TransportKind::kShm})), UsageError);
  CHECK_THROWS_AS(Engine::open(options_with({})), UsageError);
  EngineOptions addresses = options_with({TransportKind::kShm});
  addresses.rails = {"127.0.0.1"};
  CHECK_THROWS_AS(Engine::open(addresses), UsageError);
}

TEST_CASE("one region, one id, on every transport; allocated where peers can map it") {
  Set both({TransportKind::kShm, TransportKind::kNull}, 2);
  CHECK(both.transports.rail_count() == 2);
  std::set<uint64_t> ids;
  for (int round = 0; round < 3; ++round) {
    LocalRegions mapped = both.transports.allocate(1 << 16, false);
    CHECK(mapped.is_mapped());
    for (uint32_t i = 0; i < both.transports.size(); ++i) {
      CHECK(mapped.on(i)->id == mapped.id());
      CHECK(mapped.on(i)->base == mapped.base());
    }
    std::memset(mapped.base(), 1, mapped.length_bytes());
    std::vector<std::byte> memory(100);
    LocalRegions part = both.transports.register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
    CHECK(!part.is_mapped());
    CHECK(region_slot(part.id()) != region_slot(mapped.id()));
    CHECK(ids.insert(part.id()).second);
    CHECK(ids.insert(mapped.id()).second);
    both.transports.revoke_region(part);
    CHECK(both.transports.is_region_quiet(part));
  }
  CHECK(region_slot(*ids.rbegin()) < 2);  // slots come back
}

TEST_CASE("memory that is only mapped is known to the transport whose peers map it, and no transfer takes it") {
  Set both({TransportKind::kShm, TransportKind::kNull});
  LocalRegions mapped = both.transports.allocate(1 << 16, false, true);
  CHECK(mapped.is_mapped());
  CHECK(mapped.on(0)->base == mapped.base());
  CHECK(mapped.on(1) == nullptr);
  both.transports.revoke_region(mapped);
  CHECK(both.transports.is_region_quiet(mapped));

  EngineRef here = Engine::open(options_with({TransportKind::kShm, TransportKind::kNull}));
  EngineRef there = Engine::open(options_with({TransportKind::kNull}));
  {
    RegionRef board = here->alloc_for_mapping(4096), plain = here->alloc(4096, false),
              target = there->alloc(4096, false);
    CHECK(board->base()[4095] == std::byte{0});
    RemoteRegionRef remote = here->remote_region(target->descriptor());
    RemoteRegion* const dsts[] = {remote.get()};
    const uint64_t offsets[] = {0}, lengths[] = {8};
    CHECK_THROWS_AS(here->submit_write({.src = board.get(), .dst = remote.get(), .length_bytes = 8}), UsageError);
    CHECK_THROWS_AS(here->submit_read({.dst = board.get(), .src = remote.get(), .length_bytes = 8}), UsageError);
    CHECK_THROWS_AS(
        here->submit_scatter(
            {.src = board.get(), .dsts = dsts, .src_offsets = offsets, .dst_offsets = offsets, .lengths = lengths}),
        UsageError);
    TransferRef sent = here->submit_write({.src = plain.get(), .dst = remote.get(), .length_bytes = 8});
    CHECK(sent->wait(deadline_in(20), {}) == WaitResult::kReady);
    for (const RegionRef& region : {board, plain, target})
      CHECK(region->close(deadline_in(20), {}) == WaitResult::kReady);
  }
  here->close();
  there->close();
}

TEST_CASE("slots of regions run out, and come back") {
  RegionIds ids;
  std::set<uint64_t> drawn;
  for (uint32_t i = 0; i < kRegionSlots; ++i) REQUIRE(drawn.insert(ids.draw()).second);
  CHECK_THROWS_AS(ids.draw(), TransportError);
  ids.give_back(*drawn.begin());
  const uint64_t again = ids.draw();
  CHECK(region_slot(again) == region_slot(*drawn.begin()));
  CHECK(drawn.insert(again).second);
}

TEST_CASE("a sleeper wakes by the ring of any transport, and of nobody else") {
  Set both({TransportKind::kShm, TransportKind::kNull});
  TransportSet& transports = both.transports;
  for (uint32_t i = 0; i < transports.size(); ++i) {
    transports.arm();
    REQUIRE(transports.is_armed());
    std::thread ringer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      transports.at(i).wake();
    });
    const int64_t begin = now_ns();
    transports.sleeping_place().sleep_behind(deadline_in(20));
    CHECK(now_ns() - begin < 10'000'000'000);
    CHECK(!transports.is_armed());
    ringer.join();
    transports.disarm();
  }
  // Between arming and sleeping: not lost.
  transports.arm();
  transports.at(1).wake();
  transports.sleeping_place().sleep_behind(kNoDeadline);
  // From before arming: an old ring, which wakes nobody.
  transports.arm();
  transports.wake();
  transports.arm();
  const int64_t begin = now_ns();
  transports.sleeping_place().sleep_behind(deadline_in(0.05));
  CHECK(now_ns() - begin >= 50'000'000);
  CHECK(transports.is_armed());
}

TEST_CASE("news wake who sleeps in front, and who sleeps behind only while nobody does") {
  Set both({TransportKind::kShm, TransportKind::kNull});
  TransportSet& transports = both.transports;
  SleepingPlace& place = transports.sleeping_place();
  REQUIRE(place.has_front());
  std::atomic<int> woken_behind{0};
  std::atomic<bool> over{false};
  std::thread worker([&] {
    while (!over.load()) {
      place.sleep_behind(deadline_in(20));
      ++woken_behind;
    }
  });
  // In front: each time that somebody sleeps there, he is woken and the worker is not.
  for (int i = 0; i < 200; ++i) {
    transports.arm();
    std::thread ringer([&] {
      if (i % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
      transports.at(static_cast<uint32_t>(i) % transports.size()).wake();
    });
    // What was rung before he came may wake the worker, and is then no longer his.
    if (i % 2 != 0) ringer.join();
    const int64_t begin = now_ns();
    REQUIRE(place.take_front());
    CHECK(!place.take_front());
    while (transports.is_armed()) place.sleep_in_front(deadline_in(20));
    place.leave_front();
    CHECK(now_ns() - begin < 10'000'000'000);
    if (i % 2 == 0) ringer.join();
  }
  CHECK(woken_behind.load() <= 150);  // those rung before anybody came, and few others
  // Called: in front, and behind while somebody sleeps in front.
  place.call_front();
  CHECK(place.take_front());
  place.sleep_in_front(kNoDeadline);
  const int before = woken_behind.load();
  transports.arm();
  std::thread front([&] { place.sleep_in_front(kNoDeadline); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  place.call_behind();
  const int64_t begin = now_ns();
  while (woken_behind.load() == before && now_ns() - begin < 10'000'000'000) std::this_thread::yield();
  CHECK(woken_behind.load() > before);
  CHECK(transports.is_armed());
  place.call_front();
  front.join();
  place.leave_front();
  // Nobody in front: the worker.
  const int alone = woken_behind.load();
  transports.wake();
  while (woken_behind.load() == alone && now_ns() - begin < 10'000'000'000) std::this_thread::yield();
  CHECK(woken_behind.load() > alone);
  over.store(true);
  place.call_behind();
  worker.join();
}

TEST_CASE("no news are lost between who comes and goes in front, and who sleeps behind") {
  Set one({TransportKind::kShm});
  TransportSet& transports = one.transports;
  SleepingPlace& place = transports.sleeping_place();
  std::atomic<bool> over{false};
  std::atomic<int> rung{0}, taken{0};
  std::mutex progress;
  const auto drive = [&] {
    std::lock_guard lock(progress);
    do {
      transports.disarm();
      taken.store(rung.load());
      transports.arm();
    } while (rung.load() != taken.load());
  };
  // Drives only when news woke it: what it takes without a word, nobody makes good.
  std::thread guest([&] {
    for (int round = 0; !over.load(); ++round) {
      CHECK(place.take_front());
      if (place.sleep_in_front(now_ns() + 1'000 * (round % 50))) drive();
      place.leave_front();
      if (round % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(round % 70));
      // Stays away for the next few.
      for (const int seen = taken.load(); round % 20 == 0 && taken.load() < seen + 3 && !over.load();)
        std::this_thread::yield();
    }
  });
  std::thread worker([&] {
    while (!over.load()) {
      drive();
      place.sleep_behind(deadline_in(20));
    }
  });
  bool lost = false;
  for (int i = 1; i <= 5000 && !lost; ++i) {
    rung.store(i);
    transports.wake();
    const int64_t begin = now_ns();
    while (taken.load() != i && !lost) lost = now_ns() - begin > 10'000'000'000;
  }
  CHECK(!lost);
  over.store(true);
  place.call_behind();
  guest.join();
  worker.join();
}

TEST_CASE("only a non-blocking eventfd is taken for a peer's bell") {
  int ends[2];
  REQUIRE(pipe2(ends, O_NONBLOCK) == 0);
  CHECK_THROWS_AS(WakeEvent::adopt(Fd(ends[0])), UsageError);
  CHECK_THROWS_AS(WakeEvent::adopt(Fd(ends[1])), UsageError);
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  CHECK_THROWS_AS(WakeEvent::adopt(Fd(ends[0])), UsageError);
  CHECK_THROWS_AS(WakeEvent::adopt(Fd(ends[1])), UsageError);
  CHECK_THROWS_AS(WakeEvent::adopt(Fd(eventfd(0, 0))), UsageError);
  CHECK_THROWS_AS(WakeEvent::adopt(Fd()), UsageError);
  const WakeEvent mine = WakeEvent::adopt(Fd(eventfd(0, EFD_NONBLOCK)));
  mine.ring();
  mine.silence();
  mine.silence();
}

TEST_CASE("an engine with two transports serves peers of either, and of both") {
  EngineRef both = Engine::open(options_with({TransportKind::kShm, TransportKind::kNull}, 3));
  EngineRef shm = Engine::open(options_with({TransportKind::kShm}, 2));
  EngineRef null = Engine::open(options_with({TransportKind::kNull}, 5));
  const auto write = [](Engine& from, Engine& to) {
    RegionRef src = from.alloc(1 << 20, false);
    RegionRef dst = to.alloc(1 << 20, false);
    std::memset(src->base(), 7, src->length_bytes());
    RemoteRegionRef remote = from.remote_region(dst->descriptor());
    for (const uint32_t rail : {kAnyRail, from.rail_count() - 1}) {
      TransferRef sent =
          from.submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 1 << 20, .imm = 4, .rail = rail});
      REQUIRE(sent->wait(deadline_in(20), {}) == WaitResult::kReady);
      CHECK(sent->status() == Status::kDone);
    }
    const bool same = std::memcmp(src->base(), dst->base(), 1 << 20) == 0;
    CHECK(dst->close(deadline_in(5), {}) == WaitResult::kReady);
    return same;
  };
  CHECK(write(*both, *shm));
  CHECK(write(*shm, *both));
  CHECK(!write(*both, *null));  // which moves nothing
  CHECK(!write(*null, *both));
  CHECK(write(*both, *both));
  CHECK(shm->imm_counter(4)->wait(2, deadline_in(20), {}) == WaitResult::kReady);
  CHECK(both->imm_counter(4)->wait(4, deadline_in(20), {}) == WaitResult::kReady);
  const PeerRef by_shm = both->peer(shm->address());
  const PeerRef by_null = both->peer(null->address());
  CHECK(both->explain(*by_shm).transport == "shm");
  CHECK(both->explain(*by_shm).rails.size() == 3);
  CHECK(both->explain(*by_null).transport == "null");
  CHECK(both->explain(*by_null).reason == "requested by transport='null'");
  CHECK_THROWS_AS(shm->peer(null->address()), UsageError);
  for (const EngineRef& engine : {both, shm, null}) engine->close(0);
}

}  // namespace crossrail
