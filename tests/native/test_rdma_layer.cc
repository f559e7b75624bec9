// The rdma layer over scripted NICs, one thread: connecting, what is carried, what is taken back.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <random>
#include <utility>

#include "rdma_node.h"

namespace crossrail::rdma::test {

namespace {
using Work = Node::Work;
}

TEST_CASE("rdma: connects, whoever begins, and writes with an immediate") {
  Net net({});
  for (int round = 0; round < 8; ++round) {  // who leads is drawn
    Node a(net, "a"), b(net, "b");
    a.connect(b);
    CHECK(a.ups == 0);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(1000), dst = b.memory(2000);
    fill(src->bytes, 1);
    Work work;
    a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 500, 1000, 7)}, [] {});
    REQUIRE(poll_until({&a, &b}, [&] { return work.done() && b.count(7) == 1; }));
    CHECK(work.status == Status::kDone);
    CHECK(std::memcmp(src->bytes.data(), dst->bytes.data() + 500, 1000) == 0);
    CHECK(b.downs == 0);
  }
}

TEST_CASE("rdma: both sides connect at once, with lost, doubled and delayed datagrams and garbage") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    Net net({.seed = seed, .datagram_loss = 0.4, .datagram_doubling = 0.4, .datagram_delay_ns_max = 30'000'000});
    Node a(net, "a", {.rails = 2, .connect_timeout_ns = 20'000'000'000});
    Node b(net, "b", {.rails = 2, .connect_timeout_ns = 20'000'000'000});
    std::mt19937_64 random(seed);
    for (int i = 0; i < 50; ++i) {
      std::vector<uint8_t> garbage(random() % 1100);
      for (auto& byte : garbage) byte = static_cast<uint8_t>(random());
      net.inject_datagram(*b.nics[i % 2], garbage);
    }
    a.connect(b);
    b.connect(a);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && b.ups == 1; }, 20));
    auto in_a = a.memory(100), in_b = b.memory(100);
    Work there, back;
    a.post({a.request(there, WorkOp::kWrite, *in_a, 0, *in_b, 0, 100, 1)}, [] {});
    b.post({b.request(back, WorkOp::kWrite, *in_b, 0, *in_a, 0, 100, 2)}, [] {});
    REQUIRE(poll_until({&a, &b}, [&] { return there.done() && back.done() && a.count(2) == 1 && b.count(1) == 1; }));
    CHECK(there.status == Status::kDone);
    CHECK(back.status == Status::kDone);
    CHECK(b.transport->garbage_count() >= 50);
    CHECK(a.transport->session_count() == 1);
  }
}

TEST_CASE("rdma: an engine talks to itself") {
  Net net({});
  Node a(net, "a", {.rails = 2});
  a.connect(a);
  REQUIRE(poll_until({&a}, [&] { return a.ups == 1; }));
  auto src = a.memory(5000), dst = a.memory(5000);
  fill(src->bytes, 3);
  Work work, sent;
  std::string text = "to myself";
  a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 5000, 3)}, [] {});
  a.send(sent, text, [] {});
  REQUIRE(poll_until({&a}, [&] { return work.done() && sent.done() && a.count(3) == 1; }));
  CHECK(src->bytes == dst->bytes);
  REQUIRE(a.messages.size() == 1);
  CHECK(a.messages[0].first == "a");
  CHECK(a.messages[0].second == text);
}

TEST_CASE("rdma: refused with words: another version, both of which are named") {
  Net net({.has_other_version = true});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.downs == 1; }));
  CHECK(a.down_reason.find("it speaks protocol version " + std::to_string(kProtocolVersion + 1)) != std::string::npos);
  CHECK(a.down_reason.find("this build version " + std::to_string(kProtocolVersion)) != std::string::npos);
}

TEST_CASE("rdma: refused with words: another secret, another engine at the address, nobody") {
  Net net({});
  Node a(net, "a", {.secret = "one"}), b(net, "b", {.secret = "two"});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.downs == 1; }));
  CHECK(a.down_reason.find("secret") != std::string::npos);
  CHECK(!b.errors.empty());

  Node c(net, "c", {.connect_timeout_ns = 300'000'000});
  Node d(net, "d");
  auto forged = d.transport->address();
  forged.incarnation[3] ^= 1;
  c.link = c.transport->connect(std::make_shared<const Address>(forged));
  REQUIRE(poll_until({&c, &d}, [&] { return c.downs == 1; }));
  CHECK(c.down_reason.find("another engine") != std::string::npos);

  Node e(net, "e", {.connect_timeout_ns = 300'000'000});
  Address gone;
  {
    Node f(net, "f");
    gone = f.transport->address();
  }
  const int64_t began = now_ns();
  e.link = e.transport->connect(std::make_shared<const Address>(gone));
  REQUIRE(poll_until({&e}, [&] { return e.downs == 1; }));
  CHECK(now_ns() - began >= 300'000'000);
  CHECK(now_ns() - began < 1'000'000'000);
  CHECK(e.down_reason.find("no answer") != std::string::npos);
}

TEST_CASE("rdma: strangers make an engine send no more than some answers a second, wherever they say they are") {
  constexpr uint64_t kAnswersMax = 128;
  Net net({});
  Node a(net, "a"), b(net, "b");
  const auto endpoint = b.nics[0]->endpoint();
  DatagramHead head;
  head.kind = DatagramKind::kKnock;
  head.to_leader = true;
  head.endpoint = {endpoint.begin(), endpoint.end()};
  Bytes forged = begin_datagram(head);
  forged.resize(forged.size() + kMacBytes);
  const auto ask = [&] {
    for (int i = 0; i < 1000; ++i) net.inject_datagram(*a.nics[0], forged);
  };
  ask();
  CHECK_FALSE(poll_until({&a, &b}, [&] { return b.transport->garbage_count() > kAnswersMax; }, 0.1));
  CHECK(b.transport->garbage_count() == kAnswersMax);
  CHECK(a.transport->garbage_count() == 1000);
  a.connect(b);
  CHECK(poll_until({&a, &b}, [&] { return a.ups == 1; }));

  poll_until({&a, &b}, [] { return false; }, 1);
  ask();
  CHECK(poll_until({&a, &b}, [&] { return b.transport->garbage_count() == 2 * kAnswersMax; }));
}

TEST_CASE("rdma: why a path could not be made or connected is told at the other end, whichever leads") {
  bool has_been[2][2] = {};
  for (int round = 0; round < 200; ++round) {
    const bool is_made = round % 2 == 1;
    Net net({});
    Node a(net, "a", {.connect_timeout_ns = 300'000'000}), b(net, "b");
    const bool leads = a.transport->address().incarnation < b.transport->address().incarnation;
    if (std::exchange(has_been[is_made][leads], true)) continue;
    CAPTURE(leads);
    CAPTURE(is_made);
    (is_made ? b.nics[0]->connect_error : b.nics[0]->make_error) = "too few queue pairs";
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.downs == 1; }));
    CHECK_MESSAGE(a.down_reason.find("too few queue pairs") != std::string::npos, a.down_reason);
  }
}

TEST_CASE("rdma: why our own end cannot be made is told, though the peer's could not be made before") {
  bool has_led[2] = {};
  for (int round = 0; round < 100 && !(has_led[0] && has_led[1]); ++round) {
    Net net({});
    Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
    const bool leads = a.transport->address().incarnation < b.transport->address().incarnation;
    if (std::exchange(has_led[leads ? 1 : 0], true)) continue;
    CAPTURE(leads);
    b.nics[1]->make_error = "too few of theirs";
    a.connect(b);
    const auto is_said = [&](const std::string& text) {
      return std::ranges::any_of(a.transport->explain(*a.link), [&](const PathReport& report) {
        return report.what == "rail 1 to rail 1" && report.reason.find(text) != std::string::npos;
      });
    };
    REQUIRE(poll_until({&a, &b}, [&] { return is_said("too few of theirs"); }));
    b.nics[1]->make_error.clear();
    (leads ? a.nics[1]->connect_error : a.nics[1]->make_error) = "too few of ours";
    REQUIRE(poll_until({&a, &b}, [&] { return is_said("too few of ours"); }));
    CHECK(!is_said("too few of theirs"));
  }
  CHECK(has_led[0]);
  CHECK(has_led[1]);
}

TEST_CASE("rdma: when the last path ends, the loss names each path with its own reason") {
  bool has_led[2] = {};
  for (int round = 0; round < 100 && !(has_led[0] && has_led[1]); ++round) {
    Net net({});
    Node a(net, "a", {.rails = 2, .peer_timeout_ns = 300'000'000}), b(net, "b", {.rails = 2});
    const bool leads = a.transport->address().incarnation < b.transport->address().incarnation;
    if (std::exchange(has_led[leads ? 1 : 0], true)) continue;
    CAPTURE(leads);
    b.nics[1]->make_error = "too few queue pairs";
    a.connect(b);
    const auto state_of = [&](const std::string& what) {
      for (const PathReport& report : a.transport->explain(*a.link)) {
        if (report.what == what) return report.reason;
      }
      return std::string();
    };
    REQUIRE(poll_until({&a, &b}, [&] {
      return a.ups == 1 && state_of("rail 1 to rail 1").find("too few queue pairs") != std::string::npos;
    }));
    net.set_port(*b.nics[0], false);
    net.break_all_paths(*a.nics[0]);
    REQUIRE(poll_until({&a, &b}, [&] { return a.downs == 1; }));
    const size_t refused = a.down_reason.find("too few queue pairs");
    const size_t own = a.down_reason.find("rail 0 (a:0)"), other = a.down_reason.find("rail 1 (a:1)");
    INFO(a.down_reason);
    CHECK(own < other);
    CHECK(other < refused);
    CHECK(refused != std::string::npos);
  }
}

TEST_CASE("rdma: writes and reads of any length, longer than a work, over unequal numbers of rails") {
  for (const uint32_t rails : {1u, 2u, 3u}) {
    CAPTURE(rails);
    Net net(
        {.seed = rails, .delay_ns_max = 20'000, .refuses_post = 0.2, .work_bytes_max = 10'000, .path_works_max = 4});
    Node a(net, "a", {.rails = rails}), b(net, "b", {.rails = 2, .speeds = {10'000, 40'000}});
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    constexpr uint64_t kBytes = 300'000;
    auto src = a.memory(kBytes), dst = b.memory(kBytes), back = a.memory(kBytes);
    fill(src->bytes, 5);
    std::vector<std::unique_ptr<Work>> works;
    std::vector<WorkRequest> requests;
    uint64_t at = 0;
    for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{9'999}, uint64_t{10'000}, uint64_t{10'001},
                                  uint64_t{50'000}, uint64_t{123'456}}) {
      works.push_back(std::make_unique<Work>());
      requests.push_back(a.request(*works.back(), WorkOp::kWrite, *src, at, *dst, at, length, 9));
      at += length;
    }
    const auto turn = [&] {
      a.transport->poll();
      b.transport->poll();
    };
    a.post(requests, turn);
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
    REQUIRE(poll_until({&a, &b}, [&] { return b.count(9) == works.size(); }));
    for (const auto& work : works) CHECK(work->status == Status::kDone);
    CHECK(std::memcmp(src->bytes.data(), dst->bytes.data(), at) == 0);
    Work read;
    a.post({a.request(read, WorkOp::kRead, *back, 0, *dst, 0, at)}, turn);
    REQUIRE(poll_until({&a, &b}, [&] { return read.done(); }));
    CHECK(std::memcmp(src->bytes.data(), back->bytes.data(), at) == 0);
  }
}

TEST_CASE("rdma: a write of more than 4 GiB is cut into works that NICs take, and counts once") {
  for (const uint32_t rails : {1u, 2u}) {
    CAPTURE(rails);
    constexpr uint64_t kWorkBytes = uint64_t{1} << 30;
    constexpr uint64_t kBytes = 5 * kWorkBytes + 12'345;
    // Reserved, not touched: the NICs note what they were to write.
    struct Reserved {
      std::byte* base = static_cast<std::byte*>(
          ::mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      Reserved() { REQUIRE(base != MAP_FAILED); }
      ~Reserved() { ::munmap(base, kBytes); }
    } source, target;
    Net net({.work_bytes_max = kWorkBytes, .moves_bytes = false});
    Node a(net, "a", {.rails = rails}), b(net, "b", {.rails = rails});
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    const auto local = a.transport->register_memory(1, source.base, kBytes, Access::kLocal);
    const auto remote = b.transport->register_memory(2, target.base, kBytes, Access::kRemoteWrite);
    RegionDescriptor descriptor;
    descriptor.owner = b.transport->address();
    descriptor.region_id = remote->id;
    descriptor.length_bytes = kBytes;
    descriptor.access = Access::kRemoteWrite;
    descriptor.rdma_on(TransportKind::kVerbs) = remote->rdma_keys();
    const auto key = a.transport->resolve(*a.link, descriptor);
    Work work;
    WorkRequest request;
    request.op = WorkOp::kWrite;
    request.has_imm = true;
    request.wire_imm = wire_imm(9, 0);
    request.local = source.base;
    request.length_bytes = kBytes;
    request.local_region = local.get();
    request.remote = key.get();
    request.context = &work;
    a.post({request}, [] {});
    REQUIRE(poll_until({&a, &b}, [&] { return work.done() && b.count(9) == 1; }));
    CHECK(work.status == Status::kDone);
    std::ranges::sort(net.noted);
    uint64_t next = reinterpret_cast<uint64_t>(target.base);
    for (const auto& [address, length] : net.noted) {
      CHECK(address == next);
      CHECK(length <= kWorkBytes);
      next += length;
    }
    CHECK(next == reinterpret_cast<uint64_t>(target.base) + kBytes);
  }
}

TEST_CASE("rdma: posting begins on every rail in the same call, with at most 32 works for a path at a time") {
  Net net({.holds_works = true, .path_works_max = 256});
  Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 2; }));
  const auto src = a.memory(4096), dst = b.memory(4096);
  std::vector<Work> works(100);
  std::vector<WorkRequest> requests;
  for (Work& work : works) requests.push_back(a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 8));
  net.handed_over.clear();
  a.open_works += 100;
  uint32_t completed = 0;
  CHECK(a.transport->post(*a.link, kAnyRail, requests, &completed) == 100);
  REQUIRE(net.handed_over.size() == 4);
  CHECK(net.handed_over[0].first != net.handed_over[1].first);
  for (size_t i = 0; i < 4; ++i) CHECK(net.handed_over[i].second == (i < 3 ? 32 : 4));
  net.change([](NetOptions& options) { options.holds_works = false; });
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
}

// Each write goes to a place of its own, and counts once, whatever breaks. Once it is reported, the source is wiped and
// the target marked: whatever touches them later shows.
TEST_CASE("rdma: messages arrive once, whole, whatever breaks") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    Net net({.seed = seed,
             .ordered_paths = seed % 2 == 0,
             .delay_ns_max = 20'000,
             .datagram_loss = 0.1,
             .refuses_post = 0.1});
    Node a(net, "a", {.rails = 2, .peer_timeout_ns = 20'000'000'000});
    Node b(net, "b", {.rails = 2, .peer_timeout_ns = 20'000'000'000});
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    std::mt19937_64 random(seed);
    std::vector<std::string> texts;
    for (int i = 0; i < 300; ++i) {
      const size_t length = i % 50 == 7 ? 256 << 10 : i % 3 == 0 ? random() % 20'000 : random() % 100;
      texts.push_back(std::to_string(i) + " " + std::string(length, static_cast<char>('a' + i % 26)));
      if (texts.back().size() > (256 << 10)) texts.back().resize(256 << 10);
    }
    std::vector<Work> works(texts.size());
    const auto turn = [&] { a.transport->poll(), b.transport->poll(); };
    for (size_t i = 0; i < texts.size(); ++i) {
      b.holds = random() % 3 == 0;
      a.send(works[i], texts[i], [&] {
        b.holds = false;
        turn();
      });
      if (random() % 20 == 0) net.break_all_paths(*a.nics[random() % 2]);
      turn();
    }
    b.holds = false;
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }, 30));
    std::vector<std::string> got;
    for (const auto& [sender, text] : b.messages) got.push_back(text);
    std::ranges::sort(got);
    std::ranges::sort(texts);
    CHECK(got == texts);
    CHECK(b.messages[0].first == "a");
  }
}

TEST_CASE("rdma: a message too long for every buffer is refused; others are taken") {
  Net net({});
  Node a(net, "a"), b(net, "b");
  b.longest_message = 100;
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  std::string small = "small", large(5000, 'x'), empty;
  std::array<Work, 3> works;
  a.send(works[0], large, [] {});
  a.send(works[1], small, [] {});
  a.send(works[2], empty, [] {});
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
  CHECK(works[0].status == Status::kMessageTooLong);
  CHECK(works[1].status == Status::kDone);
  CHECK(works[2].status == Status::kDone);
  CHECK(b.messages.size() == 2);
}

TEST_CASE("rdma: what is queued can be taken back, also of requests longer than a work") {
  Net net({.retry_ns = 60'000'000'000, .work_bytes_max = 1000, .path_works_max = 4});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto src = a.memory(100'000), dst = b.memory(100'000);
  net.freeze(*b.nics[0], true);  // writes with immediate wait
  std::vector<Work> works(20);
  for (Work& work : works) a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 3500, 1)}, [] {});
  a.transport->poll();
  a.transport->withdraw([](void*) { return true; });
  net.freeze(*b.nics[0], false);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
  int withdrawn = 0;
  for (const Work& work : works) withdrawn += work.withdrawn;
  CHECK(withdrawn >= 18);
  poll_until({&a, &b}, [] { return false; }, 0.02);
  CHECK(b.count(1) == works.size() - static_cast<size_t>(withdrawn));
}

TEST_CASE("rdma: long works wait in the engine once some are queued, and short ones are let in") {
  constexpr uint64_t kBytes = uint64_t{1} << 20;
  Net net({.holds_works = true, .work_bytes_max = kBytes, .path_works_max = 256});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 1; }));
  auto src = a.memory(kBytes), dst = b.memory(kBytes);
  Work longs, shorts;
  const auto post = [&](Work& work, uint64_t length, size_t count) {
    const std::vector<WorkRequest> requests(count, a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, length));
    uint32_t completed = 0;
    const uint32_t posted = a.transport->post(*a.link, kAnyRail, requests, &completed);
    work.open += static_cast<int>(posted);
    a.open_works += static_cast<int>(posted);
    return posted;
  };
  longs.open = shorts.open = 0;
  constexpr uint32_t kLongs = 4 + 16;  // a window, and four that are queued
  CHECK(post(longs, kBytes, 100) == kLongs);
  CHECK(post(longs, kBytes, 1) == 0);
  CHECK(post(shorts, kShortBytesMax, 3) == 3);

  a.transport->withdraw([](void*) { return true; });  // what is queued
  CHECK(longs.withdrawn == 16);
  CHECK(shorts.withdrawn == 3);

  CHECK(post(longs, kBytes, 100) == 16);
  net.change([](NetOptions& options) { options.holds_works = false; });
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
  CHECK(longs.bytes == (kLongs * kBytes));
  CHECK(post(longs, kBytes, 100) == kLongs);  // nothing that has gone is still counted
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));

  net.change([](NetOptions& options) { options.holds_works = true; });
  CHECK(post(shorts, kShortBytesMax, 3000) == 3000);  // more bytes than long ones may have
  CHECK(post(longs, kBytes, 100) == 16);              // which they do not keep out
  net.change([](NetOptions& options) { options.holds_works = false; });
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
}

TEST_CASE("rdma: a work for one rail waits for that rail, and fails when it stays away") {
  Net net({});
  Node a(net, "a", {.rails = 2, .peer_timeout_ns = 500'000'000}), b(net, "b", {.rails = 2});
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && a.open_paths() == 2; }));
  auto src = a.memory(1000), dst = b.memory(1000);
  net.set_port(*a.nics[1], false);
  poll_until({&a, &b}, [] { return false; }, 0.01);
  Work pinned, free;
  a.post({a.request(pinned, WorkOp::kWrite, *src, 0, *dst, 0, 10, 1)}, [] {}, 1);
  a.post({a.request(free, WorkOp::kWrite, *src, 0, *dst, 0, 10, 2)}, [] {});
  REQUIRE(poll_until({&a, &b}, [&] { return free.done(); }));
  CHECK(free.status == Status::kDone);
  REQUIRE(poll_until({&a, &b}, [&] { return pinned.done(); }));
  CHECK(pinned.status == Status::kTransportFailed);
  CHECK(pinned.detail.find("rail 1 is down") != std::string::npos);
  CHECK(a.downs == 0);
}

}  // namespace crossrail::rdma::test
