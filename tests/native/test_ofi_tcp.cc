// The ofi NIC on libfabric's own tcp provider, over 127.0.0.0/8.
#include <doctest/doctest.h>
#include <poll.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "ofi_rig.h"
#include "plain_libfabric.h"
#include "transport/ofi/open.h"
#include "transport/ofi/wire.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

std::unique_ptr<ofi::OfiNic> open_nic(const std::string& address) {
  const auto library = ofi::open_library();
  const ofi::Rules rules = ofi::rules_for("tcp");
  auto devices = ofi::choose(*library, rules, {address}, 1);
  return std::make_unique<ofi::OfiNic>(library, rules, std::move(devices.front()));
}

// ./dev test brings a libfabric. Elsewhere there may be none: said, so that nobody takes silence for success.
bool has_library() {
  const ofi::Presence presence = ofi::presence();
  if (!presence.found) MESSAGE("left out: " << presence.missing);
  return presence.found;
}

struct TcpPair : OfiPair {
  TcpPair() : OfiPair(open_nic("127.0.0.1"), open_nic("127.0.0.2")) { connect(); }
  ~TcpPair() {
    if (at_a) CHECK(end(a, at_a));
    if (at_b) CHECK(end(b, at_b));
  }
};

void fill(OfiSide& side, int seed) {
  for (size_t i = 0; i < side.memory.size(); ++i) side.memory[i] = static_cast<std::byte>(i * 7 + seed + (i >> 8));
}

}  // namespace

TEST_CASE("ofi tcp: a NIC says what it is") {
  if (!has_library()) return;
  const auto nic = open_nic("127.0.0.3");
  CHECK(nic->name() == "127.0.0.3");
  CHECK(nic->fabric() == "tcp");
  CHECK(nic->endpoint().size() <= rdma::kEndpointBytesMax);
  CHECK(nic->limits().ordered_paths);
  CHECK(nic->limits().names_imm_paths);
  CHECK(nic->limits().path_works_max >= 16);
  CHECK(nic->fds().size() == 1);
  CHECK(nic->nearness(nic->endpoint()) == 2);
  CHECK(nic->nearness(bytes_of("nonsense")) == 0);
}

TEST_CASE("ofi tcp: writes arrive whole, and their immediates after them") {
  if (!has_library()) return;
  TcpPair pair;
  fill(pair.a, 3);
  std::vector<rdma::NicWork> works;
  size_t offset = 0;
  for (const size_t length : {0ul, 1ul, 8ul, 200ul, 4096ul, 65536ul, 300'000ul}) {
    works.push_back(pair.a.write_to(pair.b, works.size(), offset, length));
    works.back().has_imm = true;
    works.back().imm = static_cast<uint32_t>(0xf0000000u + works.size());
    offset += length;
  }
  REQUIRE(pair.post(pair.a, *pair.at_a, works));
  REQUIRE(pair.until([&] { return pair.b.events.imms.size() == works.size(); }));
  for (size_t i = 0; i < works.size(); ++i) {
    CHECK(pair.b.events.imms[i].first == pair.at_b.get());
    CHECK(pair.b.events.imms[i].second == works[i].imm);
  }
  CHECK(std::equal(pair.b.memory.begin(), pair.b.memory.begin() + offset, pair.a.memory.begin()));
  REQUIRE(pair.until([&] { return pair.a.events.done[pair.at_a.get()].size() == works.size(); }));
  CHECK(pair.a.events.failed.empty());
}

TEST_CASE("ofi tcp: an immediate of no region") {
  if (!has_library()) return;
  TcpPair pair;
  rdma::NicWork work;
  work.has_imm = true;
  work.has_remote = false;
  work.imm = 77;
  REQUIRE(pair.post(pair.a, *pair.at_a, {work}));
  REQUIRE(pair.until([&] { return pair.b.events.imms.size() == 1; }));
  CHECK(pair.b.events.imms[0].second == 77);
}

TEST_CASE("ofi tcp: reads") {
  if (!has_library()) return;
  TcpPair pair;
  fill(pair.b, 9);
  rdma::NicWork work = pair.a.write_to(pair.b, 0, 1000, 500'000);
  work.op = rdma::NicOp::kRead;
  REQUIRE(pair.post(pair.a, *pair.at_a, {work}));
  REQUIRE(pair.until([&] { return pair.a.events.done[pair.at_a.get()].size() == 1; }));
  CHECK(std::equal(pair.a.memory.begin() + 1000, pair.a.memory.begin() + 501'000, pair.b.memory.begin() + 1000));
  CHECK(pair.a.memory[999] == std::byte{0});
}

TEST_CASE("ofi tcp: fragments and datagrams") {
  if (!has_library()) return;
  TcpPair pair;
  const std::string longest(4096 - 5, 'x');
  REQUIRE(pair.until([&] { return pair.at_a->send(bytes_of("head:"), bytes_of(longest)); }));
  for (int i = 0; i < 500; ++i) {
    REQUIRE(pair.until([&] { return pair.at_b->send(bytes_of("back"), bytes_of(std::to_string(i))); }));
  }
  REQUIRE(pair.until([&] { return pair.a.events.fragments.size() == 500 && pair.b.events.fragments.size() == 1; }));
  CHECK(pair.b.events.fragments[0].first == pair.at_b.get());
  CHECK(pair.b.events.fragments[0].second == "head:" + longest);
  CHECK(pair.a.events.fragments[499].second == "back499");
  CHECK(pair.until([&] { return pair.at_a->is_sent() && pair.at_b->is_sent(); }));

  pair.a.nic->send_datagram(pair.b.nic->endpoint(), bytes_of("good day"));
  pair.a.nic->send_datagram(bytes_of("nobody"), bytes_of("lost"));
  REQUIRE(pair.until([&] { return pair.b.events.datagrams.size() == 1; }));
  CHECK(pair.b.events.datagrams[0] == "good day");
}

TEST_CASE("ofi tcp: a path takes no more works than its limit, and all complete once") {
  if (!has_library()) return;
  TcpPair pair;
  std::vector<rdma::NicWork> works;
  for (uint64_t i = 0; i < 2000; ++i) works.push_back(pair.a.write_to(pair.b, i, (i % 100) * 4096, 4096));
  REQUIRE(pair.post(pair.a, *pair.at_a, works));
  auto& done = pair.a.events.done[pair.at_a.get()];
  REQUIRE(pair.until([&] { return done.size() == works.size(); }));
  std::sort(done.begin(), done.end());
  for (uint64_t i = 0; i < done.size(); ++i) REQUIRE(done[i] == i);
}

TEST_CASE("ofi tcp: a wrong key breaks the path, and exactly what came before it has arrived") {
  if (!has_library()) return;
  TcpPair pair;
  std::vector<rdma::NicWork> works;
  for (uint64_t i = 0; i < 10; ++i) {
    works.push_back(pair.a.write_to(pair.b, i, i * 4096, 4096));
    works.back().has_imm = true;
    works.back().imm = static_cast<uint32_t>(i);
  }
  works[5].remote_key ^= 0x5a5a;
  REQUIRE(pair.post(pair.a, *pair.at_a, works));
  REQUIRE(pair.until([&] { return !pair.a.events.broken.empty(); }));
  const auto& failed = pair.a.events.failed[pair.at_a.get()];
  const auto& done = pair.a.events.done[pair.at_a.get()];
  REQUIRE(pair.until([&] { return failed.size() + done.size() == works.size(); }));
  // Acknowledgements die with the connection: what came before may be reported failed too, but the target knows better.
  CHECK(failed.size() >= 5);
  CHECK(failed[0].fault == rdma::NicFault::kUnreachable);
  CHECK(failed[1].fault == rdma::NicFault::kFlushed);
  CHECK(pair.at_a->post(works) == 0);
  pair.until([&] { return pair.b.events.imms.size() > 5; }, 0.1);
  CHECK(pair.b.events.imms.size() == 5);

  // A new path over the same NICs works.
  CHECK(pair.end(pair.a, pair.at_a));
  CHECK(pair.end(pair.b, pair.at_b));
  pair.connect();
  REQUIRE(pair.post(pair.a, *pair.at_a, {works[0]}));
  CHECK(pair.until([&] { return pair.b.events.imms.size() == 6; }));
}

TEST_CASE("ofi tcp: breaking off flushes what a silent peer did not take") {
  if (!has_library()) return;
  TcpPair pair;
  REQUIRE(pair.until([&] { return pair.at_a->send(bytes_of("warm"), {}); }));
  REQUIRE(pair.until([&] { return !pair.b.events.fragments.empty(); }));
  std::vector<rdma::NicWork> works;
  for (uint64_t i = 0; i < 64; ++i) works.push_back(pair.a.write_to(pair.b, i, 0, 1 << 20));
  REQUIRE(pair.at_a->post(works) == 64);  // nobody polls b: most of it cannot go
  for (int i = 0; i < 1000; ++i) pair.a.poll();
  const size_t done = pair.a.events.done[pair.at_a.get()].size();
  CHECK(done < 64);
  pair.at_a->break_off("enough");
  CHECK(pair.at_a->post(works) == 0);
  const Deadline end = deadline_in(5);
  while (pair.a.events.flushed[pair.at_a.get()] == 0 && now_ns() < end) pair.a.poll();
  REQUIRE(pair.a.events.flushed[pair.at_a.get()] == 1);
  CHECK(pair.a.events.failed[pair.at_a.get()].size() + pair.a.events.done[pair.at_a.get()].size() == 64);
  CHECK(pair.a.events.broken.empty());
  pair.at_a.reset();
}

TEST_CASE("ofi tcp: after flushing at the target nothing of the path lands any more") {
  if (!has_library()) return;
  TcpPair pair;
  REQUIRE(pair.until([&] { return pair.at_a->send(bytes_of("warm"), {}); }));
  REQUIRE(pair.until([&] { return !pair.b.events.fragments.empty(); }));
  fill(pair.a, 1);
  std::vector<rdma::NicWork> works;
  for (uint64_t i = 0; i < 64; ++i) works.push_back(pair.a.write_to(pair.b, i, 0, 1 << 20));
  REQUIRE(pair.at_a->post(works) == 64);
  for (int i = 0; i < 20; ++i) pair.poll();
  pair.at_b->break_off("region wanted");
  REQUIRE(pair.until([&] { return pair.b.events.flushed[pair.at_b.get()] == 1; }));
  std::fill(pair.b.memory.begin(), pair.b.memory.end(), std::byte{0xcc});
  CHECK(pair.until([&] { return !pair.a.events.broken.empty(); }));
  pair.until([] { return false; }, 0.1);
  CHECK(std::all_of(pair.b.memory.begin(), pair.b.memory.end(), [](std::byte b) { return b == std::byte{0xcc}; }));
  pair.at_b.reset();
}

TEST_CASE("ofi tcp: a revoked registration is quiet only when nothing is placed in it any more") {
  if (!has_library()) return;
  TcpPair pair;
  REQUIRE(pair.until([&] { return pair.at_a->send(bytes_of("warm"), {}); }));
  REQUIRE(pair.until([&] { return !pair.b.events.fragments.empty(); }));
  std::vector<rdma::NicWork> works;
  for (uint64_t i = 0; i < 16; ++i) works.push_back(pair.a.write_to(pair.b, i, 0, 1 << 20));
  REQUIRE(pair.at_a->post(works) == 16);
  for (int i = 0; i < 3; ++i) pair.poll();
  pair.b.registration->revoke();
  CHECK_FALSE(pair.b.registration->is_quiet());
  // A write that follows is refused, which breaks the path: the layer then ends it, and that makes it quiet too.
  REQUIRE(pair.until([&] {
    if (!pair.a.events.broken.empty() || !pair.b.events.broken.empty()) {
      pair.at_a->break_off("refused");
      pair.at_b->break_off("refused");
    }
    return pair.b.registration->is_quiet();
  }));
  std::fill(pair.b.memory.begin(), pair.b.memory.end(), std::byte{0xcc});
  pair.until([] { return false; }, 0.1);
  CHECK(std::all_of(pair.b.memory.begin(), pair.b.memory.end(), [](std::byte b) { return b == std::byte{0xcc}; }));
}

TEST_CASE("ofi tcp: revoking while nothing moves takes a round trip and harms no path") {
  if (!has_library()) return;
  TcpPair pair;
  REQUIRE(pair.post(pair.a, *pair.at_a, {pair.a.write_to(pair.b, 0, 0, 4096)}));
  REQUIRE(pair.until([&] { return pair.a.events.done[pair.at_a.get()].size() == 1; }));
  std::vector<std::byte> other(4096);
  const auto registration = pair.b.nic->register_memory(other.data(), other.size(), Access::kRemoteWrite);
  registration->revoke();
  REQUIRE(pair.until([&] { return registration->is_quiet(); }, 1));
  REQUIRE(pair.post(pair.a, *pair.at_a, {pair.a.write_to(pair.b, 1, 0, 4096)}));
  CHECK(pair.until([&] { return pair.a.events.done[pair.at_a.get()].size() == 2; }));
  CHECK(pair.a.events.broken.empty());
}

TEST_CASE("ofi tcp: a peer that does not answer a fence loses its path") {
  if (!has_library()) return;
  TcpPair pair;
  REQUIRE(pair.until([&] { return pair.at_a->send(bytes_of("warm"), {}); }));
  REQUIRE(pair.until([&] { return !pair.b.events.fragments.empty(); }));
  pair.b.registration->revoke();
  const Deadline end = deadline_in(8);
  while (!pair.b.registration->is_quiet() && now_ns() < end) {  // nobody polls a
    pair.b.poll();
    if (pair.b.events.broken.count(pair.at_b.get()) != 0) pair.at_b->break_off("as told");
  }
  CHECK(pair.b.registration->is_quiet());
}

TEST_CASE("ofi tcp: sleeping on the descriptor") {
  if (!has_library()) return;
  TcpPair pair;
  REQUIRE(pair.until([&] { return pair.at_a->send(bytes_of("warm"), {}); }));
  REQUIRE(pair.until([&] { return !pair.b.events.fragments.empty(); }));
  REQUIRE(pair.until([&] { return pair.at_a->is_sent(); }));
  pollfd sleeper{pair.b.nic->fds()[0], POLLIN, 0};
  for (int round = 0; round < 50; ++round) {
    while (pair.b.poll() != 0) {
    }
    pair.b.nic->arm();
    while (pair.b.nic->has_arrivals()) {
      pair.b.poll();
      pair.b.nic->arm();
    }
    CHECK(poll(&sleeper, 1, 0) == 0);
    rdma::NicWork work = pair.a.write_to(pair.b, round, 0, 100'000);
    work.has_imm = true;
    work.imm = static_cast<uint32_t>(round);
    REQUIRE(pair.at_a->post({&work, 1}) == 1);
    REQUIRE(poll(&sleeper, 1, 2000) == 1);
    pair.b.nic->hush();
    CHECK(poll(&sleeper, 1, 0) == 0);
    REQUIRE(pair.until([&] { return pair.b.events.imms.size() == static_cast<size_t>(round) + 1; }));
    REQUIRE(pair.until([&] { return pair.a.events.done[pair.at_a.get()].size() == static_cast<size_t>(round) + 1; }));
  }
}

TEST_CASE("ofi tcp: offers that no NIC made are refused") {
  if (!has_library()) return;
  auto a = open_nic("127.0.0.1");
  auto b = open_nic("127.0.0.2");
  const auto path = a->make_path();
  const auto other = b->make_path();
  const std::vector<uint8_t> good(other->offer().begin(), other->offer().end());
  for (size_t length = 0; length < good.size(); ++length)
    CHECK_THROWS_AS(path->connect(b->endpoint(), {good.data(), length}), TransportError);
  CHECK_THROWS_AS(path->connect(bytes_of("endpoint"), good), TransportError);
  std::vector<uint8_t> liar = good;  // a family whose addresses are longer than what is there
  liar[liar.size() - 16] = 10;
  CHECK_THROWS_AS(path->connect(b->endpoint(), liar), TransportError);
  std::vector<uint8_t> endpoint(b->endpoint().begin(), b->endpoint().end());
  endpoint[endpoint.size() - 16] = 10;
  CHECK(a->nearness(endpoint) == 0);
  a->send_datagram(endpoint, bytes_of("to nobody"));
}

TEST_CASE("ofi tcp: 64 paths at once") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  std::vector<std::unique_ptr<rdma::NicPath>> ours;
  std::vector<std::unique_ptr<rdma::NicPath>> theirs;
  for (int i = 0; i < 64; ++i) {
    ours.push_back(pair.a.nic->make_path());
    theirs.push_back(pair.b.nic->make_path());
    ours.back()->connect(pair.b.nic->endpoint(), theirs.back()->offer());
    theirs.back()->connect(pair.a.nic->endpoint(), ours.back()->offer());
  }
  rdma::NicWork work = pair.a.write_to(pair.b, 0, 0, 4096);
  work.has_imm = true;
  for (auto& path : ours) {
    work.imm = static_cast<uint32_t>(&path - ours.data());
    REQUIRE(pair.post(pair.a, *path, {work}));
  }
  REQUIRE(pair.until([&] { return pair.b.events.imms.size() == ours.size(); }));
  for (const auto& [path, imm] : pair.b.events.imms) CHECK(path == theirs[imm].get());
  for (auto& path : ours) CHECK(pair.end(pair.a, path));
  for (auto& path : theirs) CHECK(pair.end(pair.b, path));
}

TEST_CASE("ofi tcp: a path to nobody breaks by itself") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  pair.at_a = pair.a.nic->make_path();
  pair.at_b = pair.b.nic->make_path();
  const std::vector<uint8_t> offer(pair.at_b->offer().begin(), pair.at_b->offer().end());
  pair.at_b.reset();
  pair.at_a->connect(pair.b.nic->endpoint(), offer);
  CHECK(pair.at_a->post({}) == 0);
  REQUIRE(pair.until([&] { return !pair.a.events.broken.empty(); }, 8));
  CHECK(pair.end(pair.a, pair.at_a));
}

TEST_CASE("ofi tcp: a peer of plain libfabric, without code of ours, writes into registered memory and counts") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  pair.at_b = pair.b.nic->make_path();
  const auto offer = ofi::OfferWords::decode(pair.at_b->offer());
  PlainLibfabric stranger(ofi::open_library()->path, "127.0.0.3");
  std::vector<uint8_t> said(1 + 4 + 8);  // a version, whom it dials, and what shows that it may
  said[0] = 3;
  std::memcpy(said.data() + 1, &offer->path_id, 4);
  std::memcpy(said.data() + 5, &offer->token, 8);
  stranger.connect({offer->name.begin(), offer->name.end()}, said);
  REQUIRE(pair.until([&] { return stranger.is_connected(); }));
  const std::string text = "from a stranger, in plain libfabric";
  const uint64_t data = static_cast<uint64_t>(offer->path_id) << 32 | 4711;
  stranger.write(text, pair.b.registration->remote_base + 9, pair.b.registration->key, data);
  bool is_done = false;
  REQUIRE(pair.until([&] {
    is_done = stranger.is_done(text) || is_done;
    return is_done && pair.b.events.imms.size() == 1;
  }));
  CHECK(pair.b.events.imms[0].first == pair.at_b.get());
  CHECK(pair.b.events.imms[0].second == 4711);
  CHECK(std::memcmp(pair.b.memory.data() + 9, text.data(), text.size()) == 0);
}

TEST_CASE("ofi tcp: registration from other threads while the holder polls") {
  if (!has_library()) return;
  TcpPair pair;
  std::atomic<bool> stop{false};
  std::thread registrar([&] {
    std::vector<std::byte> memory(8192);
    while (!stop) {
      const auto registration = pair.b.nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
      registration->revoke();
    }
  });
  std::vector<rdma::NicWork> works;
  for (uint64_t i = 0; i < 3000; ++i) works.push_back(pair.a.write_to(pair.b, i, 0, 4096));
  CHECK(pair.post(pair.a, *pair.at_a, works));
  CHECK(pair.until([&] { return pair.a.events.done[pair.at_a.get()].size() == works.size(); }));
  stop = true;
  registrar.join();
  CHECK(pair.a.events.broken.empty());
}

}  // namespace crossrail::test
