// How often memory is registered with verbs devices: by engines over a double of libibverbs.
#include <doctest/doctest.h>

#include "engine/engine.h"
#include "util/clock.h"

#if CROSSRAIL_WITH_VERBS

#include "fake_cuda.h"
#include "fake_verbs.h"
#include "transport/verbs/open.h"
#include "transport/verbs/wire.h"
#include "util/errors.h"

using namespace crossrail;
using verbs_test::Fake;

namespace {

constexpr uint64_t kBytes = 1 << 16;

// An engine with `rails` rails on the one device.
struct Rig {
  explicit Rig(uint32_t rails = 2, std::vector<TransportKind> transports = {TransportKind::kVerbs}) : memory(kBytes) {
    EngineOptions options;
    options.name = "a";
    options.transports = std::move(transports);
    options.rail_count = rails;
    options.rails = std::vector<std::string>(rails, "fake0");
    options.polling = Polling::kManual;
    engine = Engine::open(options);
    own = fake.keys.size();
  }
  ~Rig() {
    engine->close(0);
    engine = nullptr;
    CHECK(fake.keys.empty());
    CHECK(fake.domains == 0);
  }
  RegionRef open(uint64_t offset = 0, uint64_t length_bytes = kBytes, Access access = Access::kLocal) {
    return engine->register_memory(memory.data() + offset, length_bytes, access);
  }
  void revoke(const RegionRef& region) { REQUIRE(region->revoke(deadline_in(20), {}) == WaitResult::kReady); }
  void close(const RegionRef& region) { REQUIRE(region->close(deadline_in(20), {}) == WaitResult::kReady); }
  // Registrations that regions have now.
  size_t count() const { return fake.keys.size() - own; }

  Fake fake;
  EngineRef engine;
  size_t own = 0;  // registrations of the NICs themselves
  std::vector<std::byte> memory;
};

std::vector<uint64_t> keys_of(const RegionRef& region) {
  return region->descriptor().rdma_on(TransportKind::kVerbs).keys;
}

}  // namespace

TEST_CASE("verbs registrations: once for all rails of a device, under one key") {
  for (const uint32_t rails : {1, 2, 5}) {
    Rig rig(rails);
    CHECK(rig.fake.domains == 1);
    RegionRef region = rig.open(0, kBytes, Access::kRemoteWrite);
    CHECK(rig.count() == 1);
    const std::vector<uint64_t> keys = keys_of(region);
    CHECK(keys == std::vector<uint64_t>(rails, keys.front()));
    RegionRef allocated = rig.engine->alloc(kBytes, false);
    CHECK(rig.count() == 2);
    rig.close(region);
    CHECK(rig.count() == 1);
    CHECK(!rig.fake.keys.contains(keys.front()));
  }
}

TEST_CASE("verbs registrations: none of memory that peers of the host only map") {
  Rig rig(2, {TransportKind::kShm, TransportKind::kVerbs});
  const uint64_t made = rig.fake.registrations;
  RegionRef board = rig.engine->alloc_for_mapping(kBytes);
  CHECK(rig.fake.registrations == made);
  CHECK(board->is_mapped());
  CHECK(keys_of(board) == std::vector<uint64_t>(2, 0));  // as many as a descriptor has, and of nothing
  RegionRef allocated = rig.engine->alloc(kBytes, false);
  CHECK(rig.fake.registrations == made + 1);
  rig.close(board);
  rig.close(allocated);
}

TEST_CASE("verbs registrations: sources within an open one cost the device nothing") {
  Rig rig;
  RegionRef arena = rig.open();
  CHECK(rig.count() == 1);
  const uint64_t made = rig.fake.registrations;
  for (uint64_t step = 0; step < 100; ++step) {
    RegionRef source = rig.open(step * 64, 4096);
    rig.close(source);
  }
  CHECK(rig.fake.registrations == made);
  rig.close(arena);
  CHECK(rig.count() == 0);
  // Nothing is kept: without one that is open each has its own.
  for (uint64_t step = 0; step < 3; ++step) rig.close(rig.open());
  CHECK(rig.fake.registrations == made + 3);
}

TEST_CASE("verbs registrations: what regions keep while their peers are locked out is one for all of them") {
  Rig rig;
  std::vector<RegionRef> doors;
  for (int i = 0; i < 4; ++i) doors.push_back(rig.open(0, kBytes, Access::kRemoteWrite));
  CHECK(rig.count() == 4);
  for (const RegionRef& door : doors) {
    const uint64_t key = keys_of(door).front();
    rig.revoke(door);
    CHECK(!rig.fake.keys.contains(key));  // what peers had is gone, each time
  }
  CHECK(rig.count() == 1);
  doors[0]->renew();
  CHECK(rig.count() == 2);
  rig.revoke(doors[0]);
  CHECK(rig.count() == 1);
  for (const RegionRef& door : doors) rig.close(door);
  CHECK(rig.count() == 0);
}

TEST_CASE("verbs registrations: a revoked source uses the same ones before, while and after it is revoked") {
  Rig rig;
  RegionRef source = rig.open(), other = rig.open(10, 10);
  const uint64_t made = rig.fake.registrations;
  rig.revoke(source);
  source->renew();
  rig.revoke(source);
  CHECK(rig.fake.registrations == made);
  rig.close(source);
  CHECK(rig.count() == 1);
  rig.close(other);
  CHECK(rig.count() == 0);
}

TEST_CASE("verbs registrations: one that the NIC may not write by is nobody else's, who may have to") {
  Rig rig;
  rig.fake.register_refuses_flags = IBV_ACCESS_LOCAL_WRITE;
  RegionRef read_only = rig.open();
  rig.fake.register_refuses_flags = 0;
  RegionRef part = rig.open(0, 100);
  CHECK(rig.count() == 2);
  RegionRef within = rig.open(50, 50);
  CHECK(rig.count() == 2);
}

TEST_CASE("verbs registrations: a device that refuses one leaves those there are in use") {
  Rig rig;
  RegionRef region = rig.open(0, 4096);
  rig.fake.register_error = ENOMEM;
  CHECK_THROWS_AS(rig.open(0, 4097), TransportError);
  CHECK_THROWS_AS(rig.open(0, 4096, Access::kRemoteWrite), TransportError);
  RegionRef part = rig.open(100, 100);
  CHECK(rig.count() == 1);
}

TEST_CASE("verbs registrations: when the device is gone, peers can still be locked out of what it knew") {
  for (const bool has_other : {false, true}) {
    CAPTURE(has_other);
    std::vector<TransportKind> transports{TransportKind::kVerbs};
    if (has_other) transports.insert(transports.begin(), TransportKind::kShm);
    Rig rig(2, transports);
    RegionRef region = rig.open(0, kBytes, Access::kRemoteWrite);
    rig.fake.tell(IBV_EVENT_DEVICE_FATAL);
    rig.fake.register_error = EIO;
    const Deadline deadline = deadline_in(20);
    while (!rig.fake.events.empty() && now_ns() < deadline) rig.engine->progress();
    rig.engine->progress();
    rig.revoke(region);
    CHECK(rig.count() == 0);
    RegionRef source = rig.open(100, 100);
    if (has_other) {  // where shm's peers reach it
      region->renew();
      CHECK(keys_of(region) == std::vector<uint64_t>(2, rdma::kNoKey));
    } else {
      CHECK_THROWS_WITH_AS(region->renew(), doctest::Contains("the devices of all rails are gone"), TransportError);
    }
    rig.close(region);
  }
}

TEST_CASE("verbs registrations: those that the device does not let go of yet are waited for, and not joined") {
  Rig rig;
  RegionRef region = rig.open(), part = rig.open(100, 100);
  rig.fake.deregister_error = EBUSY;
  rig.close(region);  // `part` uses them on
  CHECK(part->close(deadline_in(0.01), {}) == WaitResult::kTimeout);
  CHECK(rig.count() == 1);
  RegionRef next = rig.open(100, 100);
  CHECK(rig.count() == 2);
  rig.fake.deregister_error = 0;
  rig.close(part);
  CHECK(rig.count() == 1);
}

TEST_CASE("verbs registrations: of a GPU's memory, for the same range only") {
  test::FakeCuda cuda;
  Rig rig;
  std::byte* const memory = cuda.allocate(8192);
  const auto open = [&](uint64_t offset, uint64_t length_bytes) {
    return rig.engine->register_memory(memory + offset, length_bytes, Access::kLocal, MemoryKind::kCuda);
  };
  RegionRef whole = open(0, 8192), same = open(0, 8192);
  CHECK(rig.count() == 1);
  CHECK(same->given_by() == "dma-buf");
  RegionRef part = open(4096, 4096);
  CHECK(rig.count() == 2);
}

TEST_CASE("verbs registrations: rails of one device hear of what concerns them, whoever reads it") {
  struct Told final : rdma::NicEvents {
    int broken = 0;
    int ports = 0;
    std::string fatal;
    void on_work_done(rdma::NicPath&, uint64_t, bool) override {}
    void on_work_failed(rdma::NicPath&, uint64_t, rdma::NicFault, int, const std::string&) override {}
    void on_imm(rdma::NicPath*, uint32_t) override {}
    void on_fragment(rdma::NicPath*, std::span<const uint8_t>) override {}
    void on_datagram(std::span<const uint8_t>) override {}
    void on_nobody(std::span<const uint8_t>) override {}
    void on_path_broken(rdma::NicPath&, bool, const std::string&) override { ++broken; }
    void on_path_flushed(rdma::NicPath&) override {}
    void on_port(bool, const std::string&) override { ++ports; }
    void on_device_fatal(const std::string& reason) override { fatal = reason; }
  };
  Fake fake;
  TransportOptions options;
  options.rails = {"fake0", "fake0"};
  auto nics = verbs::open_nics(options);
  CHECK(nics[0]->shares_registrations_with(*nics[1]));
  std::vector<std::unique_ptr<rdma::NicPath>> paths;
  std::vector<uint32_t> numbers;
  for (const auto& nic : nics) {
    paths.push_back(nic->make_path());
    paths.back()->connect(nic->endpoint(), verbs::encode(verbs::Offer{16, 3, 4, 5, 6}));
    numbers.push_back(verbs::decode_offer(paths.back()->offer())->work_queue_pair);
  }
  std::vector<Told> told(2);
  // The first reads what there is, also for the second, which has not looked yet.
  const auto let_first_read = [&] {
    const Deadline deadline = deadline_in(20);
    while (!fake.events.empty() && now_ns() < deadline) nics[0]->poll(told[0]);
    REQUIRE(fake.events.empty());
  };
  fake.tell(IBV_EVENT_QP_FATAL, &fake.queue_pair(numbers[1]).qp);
  let_first_read();
  CHECK(told[0].broken == 0);
  CHECK(nics[1]->has_arrivals());
  nics[1]->poll(told[1]);
  CHECK(told[1].broken == 1);
  CHECK(!nics[1]->has_arrivals());

  fake.port_state = IBV_PORT_DOWN;
  fake.tell(IBV_EVENT_PORT_ERR);
  let_first_read();
  CHECK(told[0].ports == 1);
  CHECK(nics[1]->has_arrivals());
  nics[1]->poll(told[1]);
  CHECK(told[1].ports == 1);

  fake.tell(IBV_EVENT_DEVICE_FATAL);
  let_first_read();
  CHECK(!told[0].fatal.empty());
  CHECK(told[0].broken == 1);
  CHECK(nics[1]->has_arrivals());
  CHECK(nics[1]->poll(told[1]) > 0);
  CHECK(!told[1].fatal.empty());
  CHECK(!nics[1]->has_arrivals());
  paths.clear();
}

#endif
