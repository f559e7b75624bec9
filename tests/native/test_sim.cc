// Parts of the simulator: what has to be the same on every machine, and what a flushed path promises.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "transport/sim/events.h"
#include "transport/sim/model.h"
#include "transport/sim/prng.h"
#include "transport/sim/world.h"

namespace crossrail::sim {

namespace {

NicModel model(bool ordered) {
  return {.name = "test",
          .bytes_per_s = 10'000'000'000,
          .latency_ns = 2'000,
          .completion_ns = 2'000,
          .jitter_ns = 500,
          .is_ordered = ordered,
          .works_max = 64,
          .work_bytes_max = 1 << 20};
}

EngineRef open_engine(const std::shared_ptr<World>& world, const std::string& name, bool ordered) {
  const uint32_t host = world->fabric().add_host(name, {model(ordered)}, {1'000'000'000'000, 1'000});
  EngineOptions options;
  options.name = name;
  options.transports = {TransportKind::kSim};
  options.simulation = world;
  options.simulated_host = host;
  return Engine::open(options);
}

}  // namespace

TEST_CASE("the random numbers are xoshiro256**'s") {
  // Of the reference implementation with the state that splitmix64 makes of seed 0.
  Prng prng(0);
  CHECK(prng.next() == 0x99ec5f36cb75f2b4);
  CHECK(prng.next() == 0xbf6e1f784956452a);
  Prng other(1);
  for (int i = 0; i < 1000; ++i) CHECK(other.below(7) < 7);
  CHECK(!other.chance(0));
  CHECK(other.chance(1'000'000));
  CHECK(other.up_to(0) == 0);
}

TEST_CASE("events come by time, and those of one moment in the order in which they were planned") {
  EventQueue queue;
  std::mt19937 random(1);
  for (uint32_t i = 0; i < 2000; ++i) queue.push(random() % 50, EventKind::kPart, i);
  Event last = queue.pop();
  while (!queue.empty()) {
    const Event next = queue.pop();
    REQUIRE((next.at_ns > last.at_ns || (next.at_ns == last.at_ns && next.what > last.what)));
    last = next;
  }
}

TEST_CASE("a wire takes one thing after the other, in picoseconds") {
  Wire wire;
  const Wire::Time length = Wire::duration(64, 50'000'000'000);  // 1.28 ns
  CHECK(length == 1280);
  for (int i = 0; i < 1000; ++i) wire.take(0, length);
  CHECK(Wire::ns(wire.take(0, length)) == 1280);
  CHECK(wire.take(10'000'000, length) == 10'000'000);
  CHECK(Wire::duration(uint64_t{1} << 40, 1'000'000'000) == static_cast<Wire::Time>(uint64_t{1} << 40) * 1000);
}

TEST_CASE("an engine whose last reference a transfer drops ends after the turn") {
  const auto world = std::make_shared<World>(1, size_t{0});
  EngineRef a = open_engine(world, "a", true);
  const EngineRef b = open_engine(world, "b", true);
  std::vector<std::byte> memory(64);
  RegionRef dst = b->register_phantom(1 << 20);
  {
    const RegionRef src = a->register_memory(memory.data(), memory.size(), Access::kLocal);
    WriteRequest request;
    request.src = src.get();
    const RemoteRegionRef remote = a->remote_region(dst->descriptor());
    request.dst = remote.get();
    request.length_bytes = 64;
    a->submit_write(request);
  }
  a = nullptr;
  const uint64_t before = world->totals().works;
  while (world->advance(world->now_ns() + 1'000'000) == Simulation::Step::kMoved) {
  }
  CHECK(world->totals().works == before + 1);
  dst = nullptr;
  b->close();
}

TEST_CASE("after a transfer has ended, however it did, nothing of it touches memory") {
  for (const bool ordered : {true, false}) {
    for (uint64_t seed = 0; seed < 30; ++seed) {
      CAPTURE(seed);
      const auto world = std::make_shared<World>(seed, size_t{0});
      const EngineRef a = open_engine(world, "a", ordered);
      const EngineRef b = open_engine(world, "b", ordered);
      auto source = std::make_unique<std::vector<std::byte>>(256 << 10, std::byte{1});
      std::vector<std::byte> target(256 << 10);
      RegionRef src = a->register_memory(source->data(), source->size(), Access::kLocal);
      const RegionRef dst = b->register_memory(target.data(), target.size(), Access::kRemoteWrite);
      WriteRequest request;
      request.src = src.get();
      const RemoteRegionRef remote = a->remote_region(dst->descriptor());
      request.dst = remote.get();
      request.length_bytes = source->size();
      const TransferRef transfer = a->submit_write(request);
      Prng draw(seed);
      const PeerRef peer = a->peer(b->address());
      world->at(world->now_ns() + draw.up_to(120'000), [&] { a->forget_peer(*peer); });
      REQUIRE(transfer->wait(world->now_ns() + 60'000'000'000, {}) == WaitResult::kReady);
      REQUIRE(src->close(world->now_ns() + 60'000'000'000, {}) == WaitResult::kReady);
      src = nullptr;
      source.reset();  // ASan sees whoever reads it now
      const std::vector<std::byte> seen = target;
      while (world->advance(world->now_ns() + 10'000'000) == Simulation::Step::kMoved) {
      }
      CHECK(seen == target);
      a->close();
      b->close();
    }
  }
}

TEST_CASE("a wait that a callback ends by throwing is over: time waits for its thread") {
  constexpr int64_t kFar = World::kOriginNs + 1'000'000'000;
  World world(1, 0);
  world.set_callbacks([] { return true; }, [] { throw std::runtime_error("Ctrl-C"); });
  {
    const World::Wait wait(&world);
    // It has looked at all that happened, there and back.
    for (int i = 0; i < 2; ++i) CHECK(world.advance(World::kOriginNs) == Simulation::Step::kReached);
    CHECK_THROWS_AS(world.run_callbacks(), std::runtime_error);
  }
  // What it does next may be at any moment now.
  std::thread([&] {
    const World::Wait wait(&world);
    CHECK(world.advance(kFar) == Simulation::Step::kHeld);
  }).join();
}

}  // namespace crossrail::sim
