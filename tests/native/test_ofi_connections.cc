// Connections of the ofi NIC over libfabric's tcp: who is let in, how ends are noticed, what strangers can do to a
// port.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "ofi_rig.h"
#include "transport/ofi/lines.h"
#include "transport/ofi/open.h"
#include "util/errors.h"
#include "util/memory_map.h"

namespace crossrail::test {
namespace {

std::unique_ptr<ofi::OfiNic> open_nic(const std::string& address) {
  const auto library = ofi::open_library();
  const ofi::Rules rules = ofi::rules_for("tcp");
  return std::make_unique<ofi::OfiNic>(library, rules, std::move(ofi::choose(*library, rules, {address}, 1).front()));
}

bool has_library() {
  const ofi::Presence presence = ofi::presence();
  if (!presence.found) MESSAGE("left out: " << presence.missing);
  return presence.found;
}

ofi::OfferWords offer_of(const rdma::NicPath& path) { return *ofi::OfferWords::decode(path.offer()); }

bool is_usable(OfiPair& pair) {
  const size_t before = pair.b.events.imms.size();
  rdma::NicWork work = pair.a.write_to(pair.b, 0, 0, 4096);
  work.has_imm = true;
  return pair.post(pair.a, *pair.at_a, {work}) && pair.until([&] { return pair.b.events.imms.size() == before + 1; });
}

// A plain socket, connected to a NIC's port.
Fd socket_to(const ofi::Name& name) {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(connect(fd.get(), reinterpret_cast<const sockaddr*>(name.data()), sizeof(sockaddr_in)) == 0);
  return fd;
}

// Whether the other side has ended it.
bool has_ended(const Fd& fd) {
  char byte;
  const ssize_t got = recv(fd.get(), &byte, 1, MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN);
}

}  // namespace

TEST_CASE("ofi connections: whichever end is connected first, and however late the other") {
  if (!has_library()) return;
  for (const bool a_first : {true, false}) {
    OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
    pair.at_a = pair.a.nic->make_path();
    pair.at_b = pair.b.nic->make_path();
    const auto connect_a = [&] { pair.at_a->connect(pair.b.nic->endpoint(), pair.at_b->offer()); };
    const auto connect_b = [&] { pair.at_b->connect(pair.a.nic->endpoint(), pair.at_a->offer()); };
    a_first ? connect_a() : connect_b();
    pair.until([] { return false; }, 0.05);
    const rdma::NicWork work = pair.a.write_to(pair.b, 0, 0, 8);
    CHECK((a_first ? pair.at_b : pair.at_a)->post({&work, 1}) == 0);
    a_first ? connect_b() : connect_a();
    CHECK(is_usable(pair));
    CHECK(pair.end(pair.a, pair.at_a));
    CHECK(pair.end(pair.b, pair.at_b));
  }
}

TEST_CASE("ofi connections: a region is not held up by a connection that stands before its path is connected") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  pair.at_b = pair.b.nic->make_path();
  const ofi::OfferWords offer = offer_of(*pair.at_b);
  OfiStranger stranger("127.0.0.3");
  REQUIRE(stranger.dial(offer.name, ofi::DialWords{offer.path_id, offer.token}.encode(), [&] { pair.poll(); }));
  pair.b.registration->revoke();
  REQUIRE(pair.until([&] { return pair.b.events.broken.contains(pair.at_b.get()); }));
  CHECK_FALSE(pair.b.registration->is_quiet());
  pair.at_b.reset();  // as the layer does with what was never connected
  CHECK(pair.until([&] { return pair.b.registration->is_quiet(); }));
}

TEST_CASE("ofi connections: an end that goes is noticed by the other without anything under way") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  pair.connect();
  REQUIRE(is_usable(pair));
  pair.at_a->break_off("going");
  REQUIRE(pair.until([&] { return pair.b.events.broken.contains(pair.at_b.get()); }));
  CHECK(pair.b.events.broken[pair.at_b.get()].find("closed the connection") != std::string::npos);
  CHECK(pair.end(pair.a, pair.at_a));
  CHECK(pair.end(pair.b, pair.at_b));
}

TEST_CASE("ofi connections: a path is for who knows its token, and for one") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  pair.connect();
  REQUIRE(is_usable(pair));
  OfiStranger stranger("127.0.0.3");
  const auto poll = [&] { pair.poll(); };
  const ofi::OfferWords offer = offer_of(*pair.at_b);
  CHECK_FALSE(stranger.dial(offer.name, ofi::DialWords{offer.path_id, offer.token}.encode(), poll));
  const auto fresh = pair.b.nic->make_path();
  const ofi::OfferWords open = offer_of(*fresh);
  CHECK(open.token != offer.token);
  CHECK_FALSE(stranger.dial(open.name, ofi::DialWords{open.path_id, open.token ^ 1}.encode(), poll));
  CHECK_FALSE(stranger.dial(open.name, ofi::DialWords{open.path_id + 1, open.token}.encode(), poll));
  CHECK(stranger.dial(open.name, ofi::DialWords{open.path_id, open.token}.encode(), poll));
  CHECK(is_usable(pair));
  CHECK(pair.a.events.broken.empty());
  CHECK(pair.end(pair.a, pair.at_a));
  CHECK(pair.end(pair.b, pair.at_b));
}

TEST_CASE("ofi connections: requests that make no sense are turned away") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  pair.connect();
  OfiStranger stranger("127.0.0.3");
  const ofi::OfferWords offer = offer_of(*pair.at_b);
  std::mt19937 random(3);
  for (size_t bytes = 0; bytes < 40; ++bytes) {
    std::vector<uint8_t> junk = ofi::DialWords{offer.path_id, offer.token ^ 4}.encode();
    junk.resize(bytes);
    if (bytes % 2 == 0) std::ranges::generate(junk, [&] { return static_cast<uint8_t>(random()); });
    CHECK_FALSE(stranger.dial(offer.name, junk, [&] { pair.poll(); }));
  }
  CHECK(is_usable(pair));
  CHECK(pair.end(pair.a, pair.at_a));
  CHECK(pair.end(pair.b, pair.at_b));
}

TEST_CASE("ofi connections: nobody at a port is told of datagrams and of paths") {
  if (!has_library()) return;
  OfiPair pair(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  pair.at_a = pair.a.nic->make_path();
  pair.at_b = pair.b.nic->make_path();
  const std::vector<uint8_t> endpoint(pair.b.nic->endpoint().begin(), pair.b.nic->endpoint().end());
  const std::vector<uint8_t> offer(pair.at_b->offer().begin(), pair.at_b->offer().end());
  pair.a.nic->send_datagram(endpoint, bytes_of("hello"));
  REQUIRE(pair.until([&] { return pair.b.events.datagrams.size() == 1; }));
  CHECK(pair.a.events.nobody.empty());

  pair.at_b.reset();
  pair.b.registration.reset();
  pair.b.nic = open_nic("127.0.0.2");
  const Deadline end = deadline_in(10);
  while (pair.a.events.nobody.empty() && now_ns() < end) {
    pair.a.nic->send_datagram(endpoint, bytes_of("hello"));
    pair.a.poll();
  }
  REQUIRE(!pair.a.events.nobody.empty());
  CHECK(pair.a.events.nobody[0] == endpoint);
  CHECK(pair.b.events.datagrams.size() == 1);
}

TEST_CASE("ofi connections: silent sockets at the port harm nothing, whenever they speak, and end with the NIC") {
  if (!has_library()) return;
  auto pair = std::make_unique<OfiPair>(open_nic("127.0.0.1"), open_nic("127.0.0.2"));
  const ofi::Name port = ofi::EndpointWords::decode(pair->b.nic->endpoint())->name;
  std::vector<Fd> sockets;
  for (int round = 0; round < 10; ++round) {
    // Accepted before the path begins, and heard of after it has ended.
    for (int i = 0; i < 4; ++i) sockets.push_back(socket_to(port));
    pair->connect();
    REQUIRE(is_usable(*pair));
    CHECK(pair->end(pair->a, pair->at_a));
    CHECK(pair->end(pair->b, pair->at_b));
    const std::string junk(round * 20, 'x');
    CHECK(send(sockets.end()[-1].get(), junk.data(), junk.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(junk.size()));
    sockets.end()[-2].reset();
    pair->until([] { return false; }, 0.01);
  }
  std::erase_if(sockets, [](const Fd& fd) { return !fd; });
  pair.reset();
  for (const Fd& fd : sockets) CHECK(has_ended(fd));
}

TEST_CASE("ofi connections: lines are bounded, at either end") {
  if (!has_library()) return;
  OfiStranger one("127.0.0.1");
  OfiStranger two("127.0.0.2");
  constexpr int64_t kSecond = 1'000'000'000;
  constexpr size_t kLinesIn = 256;
  ofi::Lines lines(one.domain, one.listener);
  std::vector<std::unique_ptr<ofi::Endpoint>> dialed;
  std::vector<const struct fid*> ended;
  const auto dial = [&](int64_t now) {
    dialed.push_back(std::make_unique<ofi::Endpoint>(two.domain, two.listener, 1, nullptr));
    dialed.back()->dial(one.listener.name(), ofi::DialWords{}.encode());
    for (const Deadline end = deadline_in(10); now_ns() < end;) {
      if (const auto request = one.listener.next(); request && request->request) lines.accept(*request->request, now);
      const auto event = two.listener.next();
      if (!event) continue;
      if (event->kind == ofi::ConnectionEvent::Kind::kConnected) return;
      ended.push_back(event->endpoint);
    }
    FAIL("no line");
  };
  for (size_t i = 0; i < kLinesIn; ++i) dial(static_cast<int64_t>(i));
  CHECK(lines.take_closed().empty());
  dial(kSecond);
  CHECK(lines.take_closed().size() == 1);
  for (const Deadline end = deadline_in(10); ended.empty() && now_ns() < end;) {
    if (const auto event = two.listener.next()) ended.push_back(event->endpoint);
  }
  REQUIRE(ended.size() == 1);
  CHECK(dialed.front()->is(ended[0]));  // that was silent for longest

  CHECK(lines.to(two.listener.name(), 0) == nullptr);
  CHECK(lines.is_dialing());
  lines.tend(4 * kSecond);
  CHECK(lines.is_dialing());
  lines.tend(6 * kSecond);  // nobody has answered
  CHECK_FALSE(lines.is_dialing());
  CHECK(lines.take_closed().size() == 1);
  CHECK(lines.next_timer() == kNoDeadline);
  dialed.clear();
  lines.close_all();
  CHECK(lines.take_closed().size() == kLinesIn);
}

}  // namespace crossrail::test
