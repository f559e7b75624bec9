// What regions share of their registrations, and what they never do, over scripted NICs; and which NICs know a region.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "rdma_node.h"
#include "util/errors.h"

namespace crossrail::rdma::test {

namespace {

using Work = Node::Work;

// Regions over one piece of memory of an engine with two rails; nobody else registers anything on its net.
struct Rig {
  explicit Rig(NetOptions options = {}) : net(options), node(net, "a", {.rails = kRails}), memory(1 << 16) {}

  std::unique_ptr<LocalRegion> open(uint64_t offset, uint64_t length_bytes, Access access = Access::kLocal) {
    return node.transport->register_memory(uint64_t{1} << 16 | node.next_region++, memory.data() + offset, length_bytes,
                                           access);
  }
  void close(std::unique_ptr<LocalRegion>& region) {
    node.transport->revoke_region(*region);
    REQUIRE(node.transport->is_region_quiet(*region));
    region.reset();
  }
  // Registrations at each NIC.
  size_t count() {
    CHECK(net.registrations() % kRails == 0);
    return net.registrations() / kRails;
  }

  static constexpr uint32_t kRails = 2;
  Net net;
  Node node;
  std::vector<std::byte> memory;
};

// Says whether it was revoked.
struct Stub final : Registration {
  explicit Stub(bool* is_revoked) : is_revoked(is_revoked) {}
  void revoke() override { *is_revoked = true; }
  bool is_quiet() const override { return *is_revoked; }
  bool* const is_revoked;
};

}  // namespace

TEST_CASE("registrations: sources within an open one's memory use its registrations") {
  Rig rig;
  auto whole = rig.open(0, 1 << 16);
  CHECK(rig.count() == 1);
  auto same = rig.open(0, 1 << 16), begin = rig.open(0, 1), middle = rig.open(4000, 30000), end = rig.open(65535, 1);
  CHECK(rig.count() == 1);
  for (auto* region : {&whole, &same, &begin, &middle, &end}) rig.close(*region);
  CHECK(rig.count() == 0);
}

TEST_CASE("registrations: what one region does not cover is registered again, also where two together would") {
  Rig rig;
  auto low = rig.open(0, 4096), high = rig.open(4096, 4096);
  CHECK(rig.count() == 2);
  auto across = rig.open(4000, 200), longer = rig.open(0, 4097), before = rig.open(8000, 193);
  CHECK(rig.count() == 5);
}

TEST_CASE("registrations: what peers may reach has keys of its own, and no other access is shared with") {
  Rig rig;
  auto source = rig.open(0, 4096);
  std::vector<std::unique_ptr<LocalRegion>> reachable;
  for (const Access access : {Access::kRemoteRead, Access::kRemoteWrite, Access::kRemoteRead, Access::kRemoteWrite})
    reachable.push_back(rig.open(0, 4096, access));
  CHECK(rig.count() == 5);
  std::set<uint64_t> keys;
  for (const auto& region : reachable)
    for (const uint64_t key : region->rdma_keys().keys) keys.insert(key);
  CHECK(keys.size() == 4 * Rig::kRails);
  rig.close(source);
  CHECK(rig.count() == 4);
  auto again = rig.open(0, 4096);  // a writer's registration is no source's
  CHECK(rig.count() == 5);
  for (auto& region : reachable) rig.close(region);
  CHECK(rig.count() == 1);
}

TEST_CASE("registrations: they end with the last region that uses them, and nobody joins where none is open") {
  Rig rig;
  auto whole = rig.open(0, 1 << 16), part = rig.open(4096, 4096);
  rig.close(whole);
  CHECK(rig.count() == 1);
  auto within_part = rig.open(5000, 100);
  CHECK(rig.count() == 1);
  // Its owner may have unmapped the rest since: the registrations reach there, what they know of it is worth nothing.
  auto outside = rig.open(0, 4096), overlapping = rig.open(8000, 400);
  CHECK(rig.count() == 3);
  rig.close(part);
  CHECK(rig.count() == 3);
  rig.close(within_part);
  CHECK(rig.count() == 2);
  auto again = rig.open(4096, 4096);
  CHECK(rig.count() == 3);
}

TEST_CASE("registrations: a region that was closed and is not destroyed yet is not joined") {
  Rig rig;
  auto closed = rig.open(0, 4096);
  rig.node.transport->revoke_region(*closed);
  REQUIRE(rig.node.transport->is_region_quiet(*closed));
  CHECK(rig.count() == 0);
  auto region = rig.open(0, 4096);
  CHECK(rig.count() == 1);
  closed.reset();
  CHECK(rig.count() == 1);
}

TEST_CASE("registrations: regions that are destroyed without being closed give theirs up likewise") {
  Rig rig;
  auto whole = rig.open(0, 4096), part = rig.open(100, 100);
  whole.reset();
  CHECK(rig.count() == 1);
  part.reset();
  CHECK(rig.count() == 0);
}

TEST_CASE("registrations: one that fails, on the first NIC or on the last, changes nothing for others") {
  Rig rig;
  auto region = rig.open(0, 4096);
  for (const uint32_t max : {Rig::kRails, Rig::kRails + 1}) {
    rig.net.change([max](NetOptions& options) { options.registrations_max = max; });
    CHECK_THROWS_AS(rig.open(4096, 4096), TransportError);
    CHECK_THROWS_AS(rig.open(0, 4096, Access::kRemoteWrite), TransportError);
    CHECK(rig.count() == 1);
    auto part = rig.open(4000, 96);  // needs none
    rig.close(part);
  }
  rig.net.change([](NetOptions& options) { options.registrations_max = UINT32_MAX; });
  auto next = rig.open(4096, 4096);
  CHECK(rig.count() == 2);
}

TEST_CASE("registrations: sources go on when others over the same memory are closed or revoked, works under way too") {
  Net net({.delay_ns_max = 3'000'000});
  Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto target = b.memory(4000);
  const size_t others = net.registrations();
  auto whole = a.memory(4000, Access::kLocal);
  const auto over = [&](uint64_t offset, uint64_t length, Access access) {
    return a.transport->register_memory(uint64_t{1} << 16 | a.next_region++, whole->bytes.data() + offset, length,
                                        access);
  };
  auto writers = over(0, 4000, Access::kRemoteWrite);
  auto half = over(2000, 2000, Access::kLocal);
  CHECK(net.registrations() == others + 2 * 2);
  for (size_t i = 0; i < 4000; ++i) whole->bytes[i] = static_cast<std::byte>(i * 31);
  const auto write = [&](Work& work, LocalRegion& from, uint64_t offset) {
    WorkRequest request = a.request(work, WorkOp::kWrite, *whole, offset, *target, offset, 100, 7);
    request.local_region = &from;
    return request;
  };
  std::vector<Work> first(20), second(20);
  std::vector<WorkRequest> requests;
  for (uint64_t i = 0; i < 20; ++i) requests.push_back(write(first[i], *half, 2000 + i * 100));
  REQUIRE(a.post(requests, [&] { a.transport->poll(); }));
  // None of these has works of its own; those of `half` are under way.
  for (LocalRegion* region : {whole->region.get(), writers.get()}) {
    a.transport->revoke_region(*region);
    CHECK(a.transport->is_region_quiet(*region));
  }
  whole->region.reset();
  writers.reset();
  CHECK(net.registrations() == others + 2);
  requests.clear();
  for (uint64_t i = 0; i < 20; ++i) requests.push_back(write(second[i], *half, 2000 + i * 100));
  REQUIRE(a.post(requests, [&] { a.transport->poll(); }));
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.count(7) == 40; }));
  for (const auto& works : {first, second})
    for (const Work& work : works) CHECK(work.status == Status::kDone);
  CHECK(std::memcmp(whole->bytes.data() + 2000, target->bytes.data() + 2000, 2000) == 0);
  a.transport->revoke_region(*half);
  CHECK(a.transport->is_region_quiet(*half));
  CHECK(net.registrations() == others);
}

TEST_CASE("registrations: an engine that closes gives up those that open regions share") {
  Rig rig;
  auto whole = rig.open(0, 4096), part = rig.open(100, 100);
  rig.node.transport->close();
  CHECK(rig.count() == 0);
  whole.reset();
  part.reset();
}

TEST_CASE("registrations: memory of a GPU is shared for the same range only, and never with a host's") {
  RegionTable regions;
  SharedRegistrations shared;
  std::vector<std::byte> memory(4096);
  bool is_revoked = false;
  uint64_t id = 0;
  const auto make = [&](uint64_t offset, uint64_t length_bytes, bool is_gpu) {
    auto region = std::make_unique<RdmaRegion>(RdmaRegion::Tables{&regions, &shared}, Access::kLocal, is_gpu);
    region->id = ++id;
    region->base = memory.data() + offset;
    region->length_bytes = length_bytes;
    return region;
  };
  auto first = make(0, 4096, true);
  first->registered = std::make_shared<Registrations>();
  first->registered->by_rail.push_back(std::make_shared<Stub>(&is_revoked));
  shared.add(*first);
  auto same = make(0, 4096, true);
  CHECK(shared.join(*same));
  CHECK(same->registered == first->registered);
  for (auto& region : {make(0, 4096, false), make(0, 4095, true), make(1, 4095, true)}) CHECK(!shared.join(*region));
  CHECK(first->is_quiet());
  CHECK(!is_revoked);
  CHECK(same->is_quiet());
  CHECK(is_revoked);
}

TEST_CASE("registrations: any order of opening and closing, beside a model that looks at every open region") {
  struct Open {
    uint64_t offset, length_bytes;
    const Registration* registration;
    std::unique_ptr<LocalRegion> region;
  };
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    Rig rig;
    std::vector<Open> open;
    for (int step = 0; step < 400; ++step) {
      if (!open.empty() && random() % 5 < 2) {
        const size_t victim = random() % open.size();
        rig.close(open[victim].region);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(victim));
      } else {
        const uint64_t length_bytes = 1 + random() % (uint64_t{1} << random() % 17);
        const uint64_t offset = random() % ((1 << 16) - length_bytes + 1);
        std::set<const Registration*> covering;
        for (const Open& one : open)
          if (one.offset <= offset && offset + length_bytes <= one.offset + one.length_bytes)
            covering.insert(one.registration);
        auto region = rig.open(offset, length_bytes);
        const Registration* const registration = static_cast<RdmaRegion&>(*region).on(0);
        CHECK(covering.contains(registration) == !covering.empty());
        open.push_back({offset, length_bytes, registration, std::move(region)});
      }
      std::set<const Registration*> live;
      for (const Open& one : open) live.insert(one.registration);
      REQUIRE(rig.count() == live.size());
    }
  }
}

TEST_CASE("registrations: threads that open and close regions over the same memory, while others write from it") {
  Net net({.delay_ns_max = 20'000});
  Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto target = b.memory(4096);
  const size_t others = net.registrations();
  auto source = a.memory(4096, Access::kLocal);
  std::atomic<uint64_t> next_id{uint64_t{2} << 16};
  std::atomic<int> running{3};
  std::vector<std::jthread> threads;  // joined also when a REQUIRE throws
  for (uint64_t number = 0; number < 3; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(number);
      std::vector<std::unique_ptr<LocalRegion>> open(4);
      for (int step = 0; step < 1500; ++step) {
        auto& region = open[random() % open.size()];
        if (region != nullptr) {
          a.transport->revoke_region(*region);
          while (!a.transport->is_region_quiet(*region)) std::this_thread::yield();
        }
        const uint64_t offset = random() % 4000;
        region = a.transport->register_memory(next_id++, source->bytes.data() + offset, 1 + random() % (4096 - offset),
                                              random() % 8 == 0 ? Access::kRemoteWrite : Access::kLocal);
      }
      --running;
    });
  }
  // A source of its own for each write: joined while the threads join and leave.
  uint64_t written = 0;
  while (running.load() > 0) {
    Work work;
    auto region = a.transport->register_memory(next_id++, source->bytes.data(), 4096, Access::kLocal);
    WorkRequest request = a.request(work, WorkOp::kWrite, *source, 0, *target, 0, 4096, 7);
    request.local_region = region.get();
    REQUIRE(a.post({request}, [&] { a.transport->poll(); }));
    REQUIRE(poll_until({&a, &b}, [&] { return work.done(); }, 30));
    CHECK(work.status == Status::kDone);
    a.transport->revoke_region(*region);
    REQUIRE(a.transport->is_region_quiet(*region));
    ++written;
  }
  threads.clear();
  CHECK(net.registrations() == others + 2);
  REQUIRE(poll_until({&a, &b}, [&] { return b.count(7) == written; }));
}

TEST_CASE("rdma: a descriptor of a known peer with fewer rails than the peer has is refused by the peer's NIC") {
  Net net({});
  Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 2; }));
  auto src = a.memory(100), dst = b.memory(100);
  dst->descriptor.rdma_on(TransportKind::kVerbs).keys.clear();
  const auto key = a.transport->resolve(*a.link, dst->descriptor);
  REQUIRE(static_cast<RdmaKey&>(*key).keys.keys.size() == 2);
  Work work;
  a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 100)}, [&] { a.transport->poll(), b.transport->poll(); });
  REQUIRE(poll_until({&a, &b}, [&] { return work.done(); }));
  CHECK(work.status == Status::kAccessDenied);
  CHECK(a.downs == 0);
}

TEST_CASE("rdma: a device that is gone keeps nobody from registering memory, and peers do not write by it") {
  for (uint32_t gone = 0; gone < 2; ++gone) {
    CAPTURE(gone);
    // As EFA: a counted write fails whose path breaks under it.
    Net net({.ordered_paths = false, .names_imm_paths = false});
    Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
    a.connect(b);
    b.connect(a);
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 2 && b.open_paths() == 2; }));
    net.end_device(*a.nics[gone]);
    a.transport->poll();
    auto in_a = a.memory(100'000), source = a.memory(100'000, Access::kLocal), in_b = b.memory(100'000);
    REQUIRE(in_a->descriptor.rdma_on(TransportKind::kVerbs).keys.at(gone) == kNoKey);
    CHECK(in_a->descriptor.rdma_on(TransportKind::kVerbs).base == reinterpret_cast<uint64_t>(in_a->bytes.data()));
    fill(in_b->bytes, gone);
    REQUIRE(b.open_paths() == 2);  // it does not know yet
    std::vector<Work> ours(50), theirs(50);
    const auto turn = [&] { a.transport->poll(), b.transport->poll(); };
    for (uint32_t i = 0; i < 50; ++i) {
      a.post({a.request(ours[i], WorkOp::kWrite, *source, 2000 * i, *in_b, 2000 * i, 1, 1)}, turn);
      b.post({b.request(theirs[i], WorkOp::kWrite, *in_b, 2000 * i, *in_a, 2000 * i, 2000, 2)}, turn);
    }
    CHECK(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.open_works == 0; }));
    for (const Work& work : theirs) CHECK_MESSAGE(work.status == Status::kDone, work.detail);
    for (const Work& work : ours) CHECK_MESSAGE(work.status == Status::kDone, work.detail);
    CHECK(a.count(2) == 50);
    CHECK(a.downs + b.downs == 0);
    a.close(*in_a);
    a.close(*source);
  }
}

TEST_CASE("rdma: with every device gone, memory for peers is refused in words, sources are not") {
  Net net({});
  Node a(net, "a", {.rails = 2});
  auto before = a.memory(1000);
  for (ScriptedNic* nic : a.nics) net.end_device(*nic);
  a.transport->poll();
  CHECK_THROWS_WITH_AS(a.memory(1000), doctest::Contains("the devices of all rails are gone: a:0, a:1"),
                       TransportError);
  auto source = a.memory(1000, Access::kLocal);
  a.close(*source);
  a.close(*before);
}

TEST_CASE("rdma: a region that no rail in reach knows fails its write in the end, and keeps no other back") {
  Net net({});
  Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 2; }));
  auto src = a.memory(1000), known = b.memory(1000), unknown = b.memory(1000);
  unknown->descriptor.rdma_on(TransportKind::kVerbs).keys = {kNoKey, kNoKey};
  Work lost, other;
  const auto turn = [&] { a.transport->poll(), b.transport->poll(); };
  a.post({a.request(lost, WorkOp::kWrite, *src, 0, *unknown, 0, 100, 1),
          a.request(other, WorkOp::kWrite, *src, 0, *known, 0, 100, 1)},
         turn);
  REQUIRE(poll_until({&a, &b}, [&] { return lost.done() && other.done(); }));
  CHECK(lost.status == Status::kTransportFailed);
  CHECK(lost.detail.find("no rail is left") != std::string::npos);
  CHECK(other.status == Status::kDone);
}

TEST_CASE("rdma: writes that wait for the only path to their region let others pass, and go when it is back") {
  Net net({});
  Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 2; }));
  auto src = a.memory(1000), known = b.memory(1000), half_known = b.memory(1000);
  half_known->descriptor.rdma_on(TransportKind::kVerbs).keys.at(0) = kNoKey;
  net.set_port(*b.nics[1], false);
  net.break_all_paths(*a.nics[1]);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 1; }));
  std::vector<Work> waiting(3), others(100);
  const auto turn = [&] { a.transport->poll(), b.transport->poll(); };
  for (uint32_t i = 0; i < 100; ++i) {
    if (i % 40 == 0) a.post({a.request(waiting[i / 40], WorkOp::kWrite, *src, 0, *half_known, 0, 100, 1)}, turn);
    a.post({a.request(others[i], WorkOp::kWrite, *src, 0, *known, 0, 100, 2)}, turn);
  }
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 3 && b.count(2) == 100; }, 1));
  net.set_port(*b.nics[1], true);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.count(1) == 3; }));
  for (const Work& work : waiting) CHECK_MESSAGE(work.status == Status::kDone, work.detail);
  for (const Work& work : others) CHECK_MESSAGE(work.status == Status::kDone, work.detail);
}

}  // namespace crossrail::rdma::test
