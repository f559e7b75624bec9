// The provider takes nothing for a while: storms of FI_EAGAIN, and memory that cannot be locked.
#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "efa_rig.h"

using namespace crossrail;
using namespace crossrail::test;

namespace {

// Works from a to b, fragments both ways and datagrams from b to a.
struct Traffic {
  explicit Traffic(EfaPair& pair) : it(pair), works(efa_pages(pair, 400)) {}

  void step() {
    posted += it.pair->at_a->post({works.data() + posted, works.size() - posted});
    for (auto* path : {it.pair->at_a.get(), it.pair->at_b.get()}) {
      size_t& count = sent[path];
      if (count < kFragments && path->send(bytes_of("n"), bytes_of(std::to_string(count)))) ++count;
    }
  }
  bool is_over() {
    step();
    return it.done().size() == works.size() && it.pair->b.events.imms.size() == works.size() &&
           it.pair->a.events.fragments.size() >= kFragments && it.pair->b.events.fragments.size() >= kFragments;
  }
  void expect_each_once() {
    CHECK(each_once(it.done(), works.size()));
    std::set<uint32_t> imms;
    for (const auto& [path, imm] : it.pair->b.events.imms) imms.insert(imm);
    CHECK(imms.size() == works.size());
    for (OfiSide* side : {&it.pair->a, &it.pair->b}) {
      std::set<std::string> seen;
      for (const auto& [path, text] : side->events.fragments) seen.insert(text);
      CHECK(seen.size() == kFragments);
      CHECK(side->events.fragments.size() == kFragments);
      CHECK(side->events.broken.empty());
    }
  }

  static constexpr size_t kFragments = 300;
  EfaPair& it;
  std::vector<rdma::NicWork> works;
  size_t posted = 0;
  std::map<rdma::NicPath*, size_t> sent;
};

}  // namespace

TEST_CASE("ofi efa: storms of refusals delay works, fragments and receives, and lose and double none") {
  for (const std::string fabric : {"efa", "efa-direct"}) {
    for (uint32_t seed = 1; seed <= 5; ++seed) {
      CAPTURE(seed);
      DoubleSettings settings;
      settings.transmit_size = 32;
      settings.imms_eat_receives = fabric == "efa-direct";
      EfaPair it(settings, seed, fabric);
      Traffic traffic(it);
      std::mt19937 random(seed);
      REQUIRE(it.pair->until(
          [&] {
            if (random() % 64 == 0) it.world.refuse(std::vector<uint32_t>{0, 50, 95, 100}[random() % 4]);
            return traffic.is_over();
          },
          60));
      it.world.refuse(0);
      traffic.expect_each_once();
    }
  }
}

TEST_CASE("ofi efa: while the provider refuses everything, paths end all the same, and new ones work afterwards") {
  EfaPair it;
  it.world.freeze(1, true);
  REQUIRE(it.pair->at_a->post(efa_pages(it, 20)) == 20);
  while (it.pair->at_a->send(bytes_of("n"), {})) {
  }
  it.world.refuse(100);
  CHECK(it.pair->end(it.pair->a, it.pair->at_a));
  CHECK(it.pair->end(it.pair->b, it.pair->at_b));
  it.world.freeze(1, false);
  it.pair->connect();  // its greeting is refused, too
  it.pair->a.nic->send_datagram(it.pair->b.nic->endpoint(), bytes_of("hello"));
  CHECK(it.pair->at_a->post(efa_pages(it, 1)) == 0);

  it.world.refuse(0);

  it.pair->a.events.done.clear();
  REQUIRE(it.pair->post(it.pair->a, *it.pair->at_a, efa_pages(it, 20)));
  CHECK(it.pair->until([&] { return it.done().size() == 20 && it.pair->b.events.datagrams.size() == 1; }));
}

TEST_CASE("ofi efa: where no more memory can be locked, fragments wait for those under way") {
  DoubleSettings settings;
  settings.devices = 3;
  settings.transmit_size = 4096;
  EfaPair it(settings);
  EfaThird c(it, 16);
  it.world.freeze(2, true);
  it.world.refuse_registrations(FI_ENOMEM);
  size_t sent = 0;
  for (const auto& path : c.paths) {
    while (path->send(bytes_of("n"), {})) ++sent;
  }
  CHECK(sent >= 32);
  CHECK_FALSE(it.pair->at_a->send(bytes_of("n"), {}));
  CHECK(it.pair->a.events.broken.empty());

  it.world.freeze(2, false);

  CHECK(it.pair->until([&] { return it.pair->at_a->send(bytes_of("n"), {}); }));
  CHECK(it.pair->until([&] { return it.pair->b.events.fragments.size() == 1; }));
  c.finish();
}

TEST_CASE("ofi efa: a path that cannot greet its peer for want of memory breaks with the limit and the remedy") {
  DoubleSettings settings;
  settings.devices = 3;
  LibfabricDouble world(settings);
  OfiPair pair(open_efa_nic(world, "efa", "rdmap0s6"), open_efa_nic(world, "efa", "rdmap1s6"));
  world.refuse_registrations(FI_ENOMEM);
  pair.connect();

  CHECK(pair.until([&] { return pair.a.events.broken.size() == 1; }, 2));

  CHECK(pair.a.events.broken[pair.at_a.get()].find("raise it (`ulimit -l unlimited`") != std::string::npos);
  CHECK(pair.end(pair.a, pair.at_a));
  CHECK(pair.end(pair.b, pair.at_b));
}
