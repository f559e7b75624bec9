// EFA by a doubled libfabric: peers that stand still, paths that are broken off, what fails, and what others notice.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "efa_rig.h"
#include "util/errors.h"

namespace crossrail::test {

TEST_CASE("ofi efa: a peer that does not answer breaks its path") {
  EfaPair it;
  REQUIRE(it.pair->post(it.pair->a, *it.pair->at_a, efa_pages(it, 1)));
  REQUIRE(it.pair->until([&] { return it.done().size() == 1; }));
  it.world.fail_towards(1, 13);
  REQUIRE(it.pair->post(it.pair->a, *it.pair->at_a, efa_pages(it, 20)));
  REQUIRE(it.pair->until([&] { return it.failed().size() == 20 && it.pair->a.events.broken.size() == 1; }));
  CHECK(it.failed()[0].fault == rdma::NicFault::kUnreachable);
  CHECK(it.failed()[1].fault == rdma::NicFault::kFlushed);
  CHECK(it.pair->at_a->post(efa_pages(it, 1)) == 0);
}

TEST_CASE("ofi efa: a path to a frozen peer is broken off, and no other peer notices") {
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    CAPTURE(seed);
    DoubleSettings settings;
    if (seed % 2 == 0) settings.version = FI_VERSION(2, 1);  // an address vector for each endpoint
    settings.devices = 3;
    settings.transmit_size = 400;
    EfaPair it(settings, seed);
    OfiSide c(open_efa_nic(it.world, "efa", "rdmap2s6"));
    auto& a = it.pair->a;
    auto to_c = a.nic->make_path();
    auto at_c = c.nic->make_path();
    to_c->connect(c.nic->endpoint(), at_c->offer());
    at_c->connect(a.nic->endpoint(), to_c->offer());
    const auto until = [&](const auto& wanted) {
      return it.pair->until([&] {
        c.poll();
        return wanted();
      });
    };
    REQUIRE(until([&] { return to_c->is_sent() && it.pair->at_a->is_sent(); }));
    const uint32_t endpoints = it.world.endpoints_open();

    it.world.freeze(2, true);
    std::vector<rdma::NicWork> lost;
    for (uint64_t i = 0; i < 50; ++i) lost.push_back(a.write_to(c, i, 0, 4096));
    REQUIRE(to_c->post(lost) == 50);
    const auto works = efa_pages(it, 100);
    REQUIRE(it.pair->at_a->post({works.data(), 60}) == 60);
    to_c->break_off("frozen");
    REQUIRE(it.pair->at_a->post({works.data() + 60, 40}) == 40);  // by the new endpoint, at once
    REQUIRE(until([&] { return a.events.flushed[to_c.get()] == 1; }));
    CHECK(a.events.failed[to_c.get()].size() == 50);
    CHECK(a.events.failed[to_c.get()][0].fault == rdma::NicFault::kFlushed);
    it.world.freeze(2, false);
    REQUIRE(until([&] { return it.done().size() == 100; }));
    CHECK(each_once(it.done(), 100));
    CHECK(it.failed().empty());
    CHECK(it.pair->b.events.imms.size() == 100);
    CHECK(c.events.imms.empty());
    CHECK(it.world.endpoints_open() == endpoints);
    to_c.reset();
    at_c->break_off("end");
    REQUIRE(until([&] { return c.events.flushed[at_c.get()] == 1; }));
    at_c.reset();
    REQUIRE(it.world.operations_pending() == 0);
    c.registration.reset();
    c.nic.reset();
    it.finish();
  }
}

TEST_CASE("ofi efa: a path is flushed in time though a peer of another one stalls") {
  DoubleSettings settings;
  settings.devices = 3;
  EfaPair it(settings);
  OfiSide c(open_efa_nic(it.world, "efa", "rdmap2s6"));
  auto& a = it.pair->a;
  auto to_c = a.nic->make_path();
  auto at_c = c.nic->make_path();
  to_c->connect(c.nic->endpoint(), at_c->offer());
  at_c->connect(a.nic->endpoint(), to_c->offer());
  REQUIRE(it.pair->until([&] {
    c.poll();
    return to_c->is_sent() && it.pair->at_a->is_sent();
  }));
  it.world.freeze(1, true);
  it.world.freeze(2, true);
  REQUIRE(to_c->post(std::vector{a.write_to(c, 0, 0, 4096)}) == 1);
  REQUIRE(it.pair->at_a->post(efa_pages(it, 3)) == 3);

  to_c->break_off("frozen");

  CHECK(it.pair->until([&] { return a.events.flushed[to_c.get()] == 1; }, 9));  // of the ten that the layer waits
  CHECK(a.events.failed[to_c.get()].size() == 1);
  REQUIRE(a.events.broken.size() == 1);
  it.pair->at_a->break_off("as it said");
  CHECK(it.pair->until([&] { return a.events.flushed[it.pair->at_a.get()] == 1; }));
  CHECK(it.failed().size() == 3);
  it.world.freeze(1, false);
  it.world.freeze(2, false);
  to_c.reset();
  at_c->break_off("end");
  REQUIRE(it.pair->until([&] {
    c.poll();
    return c.events.flushed[at_c.get()] == 1;
  }));
  at_c.reset();
  c.registration.reset();
  c.nic.reset();
  it.pair->at_a.reset();
}

TEST_CASE("ofi efa: where somebody waits for a flush, a peer of another path that stalls delays it only a little") {
  for (const bool stands_still : {true, false}) {
    CAPTURE(stands_still);
    DoubleSettings settings;
    settings.devices = 3;
    EfaPair it(settings);
    EfaThird c(it);
    it.world.freeze(1, stands_still);
    it.world.freeze(2, true);
    REQUIRE(c.paths[0]->post(std::vector{it.pair->a.write_to(c.side, 0, 0, 4096)}) == 1);
    REQUIRE(it.pair->at_a->post(efa_pages(it, 3)) == 3);
    c.paths[0]->break_off("frozen");
    it.pair->a.nic->hurry();
    CHECK(it.pair->until([&] { return it.pair->a.events.flushed[c.paths[0].get()] == 1; }, 2));
    CHECK(it.pair->a.events.broken.size() == (stands_still ? 1 : 0));
    CHECK(it.done().size() == (stands_still ? 0 : 3));
    it.world.freeze(1, false);
    it.world.freeze(2, false);
    c.finish();
  }
}

TEST_CASE("ofi efa: where somebody waits for a flush, works of another path go on as long as they keep ending") {
  DoubleSettings settings;
  settings.devices = 3;
  settings.transmit_size = 4096;
  settings.delay_max = 600;
  EfaPair it(settings);
  EfaThird c(it);
  it.world.freeze(2, true);
  REQUIRE(c.paths[0]->post(std::vector{it.pair->a.write_to(c.side, 0, 0, 4096)}) == 1);
  REQUIRE(it.pair->at_a->post(efa_pages(it, 200)) == 200);
  const int64_t began = now_ns();
  c.paths[0]->break_off("frozen");
  it.pair->a.nic->hurry();
  CHECK(it.pair->until([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // every few of which one ends
    return it.pair->a.events.flushed[c.paths[0].get()] == 1;
  }));
  CHECK(now_ns() - began > 100'000'000);
  CHECK(it.pair->a.events.broken.empty());
  CHECK(each_once(it.done(), 200));
  it.world.freeze(2, false);
  c.finish();
}

TEST_CASE("ofi efa: peers that stand still leave room for works, messages and signs of life to others") {
  for (const size_t entries : {64, 256, 4096}) {
    CAPTURE(entries);
    DoubleSettings settings;
    settings.devices = 3;
    settings.transmit_size = entries;
    EfaPair it(settings);
    EfaThird c(it, entries == 64 ? 4 : entries == 256 ? 18 : 80);
    it.world.freeze(2, true);
    const std::string message(1000, 'm'), sign(10, 's');
    for (const auto& path : c.paths) {
      uint64_t posted = 0;
      for (;;) {
        std::vector<rdma::NicWork> works;
        for (uint64_t i = 0; i < 256; ++i) works.push_back(it.pair->a.write_to(c.side, posted + i, 0, 4096));
        const uint32_t taken = path->post(works);
        if (taken == 0) break;
        posted += taken;
      }
      CHECK(posted > 0);
      while (path->send(bytes_of(message), {})) {
      }
      while (path->send(bytes_of(sign), {})) {
      }
    }
    for (uint64_t round = 0; round < 3; ++round) {
      auto works = efa_pages(it, round + 1);
      CHECK(it.pair->at_a->post({works.data() + round, 1}) == 1);
      CHECK(it.pair->at_a->send(bytes_of(message), {}));
      CHECK(it.pair->at_a->send(bytes_of(sign), {}));
      CHECK(it.pair->until([&] { return it.done().size() == round + 1 && it.pair->at_a->is_sent(); }, 5));
    }
    it.world.freeze(2, false);
    c.finish();
  }
}

TEST_CASE("ofi efa: a path alone on a long queue has all its works") {
  DoubleSettings settings;
  settings.transmit_size = 4096;
  settings.delay_max = 1;
  EfaPair it(settings);
  it.world.freeze(1, true);
  CHECK(it.pair->at_a->post(efa_pages(it, 300)) == 256);
  it.world.freeze(1, false);
}

TEST_CASE("ofi efa: what was just posted is looked for at once, what stalls is looked for seldom") {
  EfaPair it;
  auto& nic = *it.pair->a.nic;
  const auto look_ns = [&] {
    const int64_t now = now_ns();
    return nic.next_timer() - now;
  };
  REQUIRE(it.pair->until([&] { return it.pair->at_a->is_sent() && it.pair->at_b->is_sent(); }));
  const auto poll_for = [&](double seconds) {
    for (const Deadline end = deadline_in(seconds); now_ns() < end;) it.pair->poll();
  };
  poll_for(0.03);
  CHECK(look_ns() > 900'000);  // idle
  it.world.freeze(1, true);
  REQUIRE(it.pair->at_a->post(efa_pages(it, 1)) == 1);
  CHECK(look_ns() < 900'000);
  const int64_t posted_ns = now_ns();
  poll_for(0.005);
  const int64_t later_ns = look_ns();
  if (now_ns() - posted_ns < 15'000'000) CHECK(later_ns < 900'000);  // else this thread was not scheduled
  poll_for(0.05);
  CHECK(look_ns() > 900'000);
  it.world.freeze(1, false);
}

TEST_CASE("ofi efa: why the first message to a peer is refused, is said") {
  LibfabricDouble world({});
  {
    OfiPair pair(open_efa_nic(world, "efa", "rdmap0s6"), open_efa_nic(world, "efa", "rdmap1s6"));
    world.refuse_sends(-FI_EINVAL);
    pair.connect();
    CHECK(pair.until([&] { return pair.a.events.broken.size() == 1 && pair.b.events.broken.size() == 1; }, 2));
    CHECK(pair.a.events.broken[pair.at_a.get()] == "posting failed: an error of the double");
    CHECK(pair.end(pair.a, pair.at_a));
    CHECK(pair.end(pair.b, pair.at_b));
  }
  CHECK(world.violations() == std::vector<std::string>{});
}

TEST_CASE("ofi efa: breaking off a path with nothing under way replaces nothing") {
  EfaPair it;
  REQUIRE(it.pair->until([&] { return it.pair->at_a->is_sent() && it.pair->at_b->is_sent(); }));
  const uint32_t endpoints = it.world.endpoints_open();
  CHECK(it.pair->end(it.pair->a, it.pair->at_a));
  CHECK(it.world.endpoints_open() == endpoints);
}

TEST_CASE("ofi efa: completions of an endpoint that was closed may come late") {
  EfaPair it;
  REQUIRE(it.pair->until([&] { return it.pair->at_a->is_sent() && it.pair->at_b->is_sent(); }));
  it.world.freeze(1, true);
  REQUIRE(it.pair->post(it.pair->a, *it.pair->at_a, efa_pages(it, 20)));
  REQUIRE(it.pair->end(it.pair->a, it.pair->at_a));
  it.world.complete_late(0);
  CHECK_FALSE(it.pair->until([] { return false; }, 1.2));  // until nothing is kept for them any more
  it.world.freeze(1, false);
  REQUIRE(it.pair->end(it.pair->b, it.pair->at_b));

  it.pair->connect();
  REQUIRE(it.pair->post(it.pair->a, *it.pair->at_a, efa_pages(it, 500)));
  REQUIRE(it.pair->until([&] { return it.done().size() >= 500; }));
  CHECK(each_once(it.done(), 500));
}

TEST_CASE("ofi efa: an error of a receive that is over does not post it once more") {
  EfaPair it;
  REQUIRE(it.pair->until([&] { return it.pair->at_a->is_sent() && it.pair->at_b->is_sent(); }));
  it.world.fail_receipt(1);
  const std::string text = "still heard";
  REQUIRE(it.pair->at_a->send(bytes_of(text), {}));
  CHECK(it.pair->until([&] { return it.pair->b.events.fragments.size() == 1; }));
}

TEST_CASE("ofi efa: what the provider fails at by itself is told, and ends nothing") {
  EfaPair it;
  it.world.fail_by_itself(13);
  it.world.fail_by_itself(14);
  CHECK(it.pair->until([&] { return !it.pair->a.events.ports.empty() && !it.pair->b.events.ports.empty(); }));
  CHECK(it.pair->a.events.ports == std::vector<bool>{true});
  CHECK(it.pair->a.events.broken.empty());
}

TEST_CASE("ofi efa: a queue that cannot be read any more is the end of the device") {
  EfaPair it;
  REQUIRE(it.pair->until([&] { return it.pair->at_a->is_sent() && it.pair->at_b->is_sent(); }));
  it.world.freeze(1, true);
  REQUIRE(it.pair->at_a->post(efa_pages(it, 10)) == 10);
  it.world.break_queue(0);
  REQUIRE(it.pair->until([&] { return !it.pair->a.events.fatal.empty(); }));
  REQUIRE(it.pair->until([&] { return it.pair->a.events.flushed[it.pair->at_a.get()] == 1; }));
  CHECK(it.pair->a.events.broken.size() == 1);
  CHECK(it.failed().size() == 10);
  CHECK_FALSE(it.pair->a.nic->is_port_up());
  CHECK_THROWS_AS(it.pair->a.nic->make_path(), TransportError);
  it.pair->at_a.reset();
}

}  // namespace crossrail::test
