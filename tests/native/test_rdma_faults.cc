// The rdma layer over scripted NICs, one thread: every fault of the script, peers that end and peers that vanish.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "rdma_node.h"
#include "util/errors.h"

namespace crossrail::rdma::test {

namespace {
using Work = Node::Work;
}

TEST_CASE("rdma: paths break before and after works are carried out: each is counted once, nothing is touched later") {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    CAPTURE(seed);
    Net net({.seed = seed,
             .delay_ns_max = 30'000,
             .datagram_loss = 0.1,
             .datagram_delay_ns_max = 1'000'000,
             .breaks_before = 0.01,
             .breaks_after = 0.01,
             .refuses_post = 0.05});
    Node a(net, "a", {.rails = 1 + static_cast<uint32_t>(seed % 3), .peer_timeout_ns = 20'000'000'000});
    Node b(net, "b", {.rails = 2, .peer_timeout_ns = 20'000'000'000});
    a.connect(b);
    b.connect(a);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && b.ups == 1; }));
    constexpr uint64_t kEach = 600;
    constexpr uint32_t kWorks = 400;
    struct Side {
      Node* node;
      std::unique_ptr<Node::Memory> src, dst;
      std::vector<Work> works = std::vector<Work>(kWorks);
      std::vector<WorkRequest> requests;
    };
    std::array<Side, 2> sides{Side{&a, a.memory(kEach * kWorks), a.memory(kEach * kWorks)},
                              Side{&b, b.memory(kEach * kWorks), b.memory(kEach * kWorks)}};
    int wrong = 0;
    for (int s = 0; s < 2; ++s) {
      Side& side = sides[static_cast<size_t>(s)];
      Side& other = sides[static_cast<size_t>(1 - s)];
      fill(side.src->bytes, seed);
      for (uint32_t i = 0; i < kWorks; ++i) {
        const uint32_t imm = i % 4 == 3 ? kNoImm : i;
        side.requests.push_back(
            side.node->request(side.works[i], WorkOp::kWrite, *side.src, i * kEach, *other.dst, i * kEach, kEach, imm));
      }
      side.node->on_done = [&side, &other, &wrong](Work& work) {
        const auto i = static_cast<size_t>(&work - side.works.data());
        std::byte* const from = side.src->bytes.data() + i * kEach;
        std::byte* const to = other.dst->bytes.data() + i * kEach;
        wrong += std::memcmp(from, to, kEach) != 0 || work.status != Status::kDone;
        std::memset(from, 0x11, kEach);
        std::memset(to, 0x22, kEach);
      };
    }
    const auto turn = [&] {
      a.transport->poll();
      b.transport->poll();
    };
    for (uint32_t i = 0; i < kWorks; i += 20) {
      for (Side& side : sides) {
        side.node->post({side.requests.begin() + i, side.requests.begin() + i + 20}, turn);
      }
      turn();
    }
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.open_works == 0; }, 30));
    poll_until({&a, &b}, [] { return false; }, 0.02);
    CHECK(wrong == 0);
    for (Side& side : sides) {
      for (uint32_t i = 0; i < kWorks; ++i) {
        CHECK(side.node->count(i) == (i % 4 == 3 ? 0 : 1));
      }
      CHECK(std::ranges::all_of(side.dst->bytes, [](std::byte byte) { return byte == std::byte{0x22}; }));
      CHECK(side.node->downs == 0);
    }
  }
}

TEST_CASE("rdma: a cable is pulled: the other rail goes on, and the first comes back by itself") {
  for (const bool both_notice : {true, false}) {
    CAPTURE(both_notice);
    Net net({.delay_ns_max = 5'000});
    Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && a.open_paths() == 2; }));
    auto src = a.memory(1 << 20), dst = b.memory(1 << 20);
    std::vector<Work> works(600);
    const auto turn = [&] {
      a.transport->poll();
      b.transport->poll();
    };
    for (uint32_t i = 0; i < works.size(); ++i) {
      if (i == 100) net.set_port(both_notice ? *a.nics[1] : *b.nics[1], false);
      a.post({a.request(works[i], WorkOp::kWrite, *src, 0, *dst, 1000 * i, 1000, 5)}, turn);
      if (i % 10 == 0) turn();
    }
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
    REQUIRE(poll_until({&a, &b}, [&] { return b.count(5) == works.size(); }));
    for (const Work& work : works) CHECK(work.status == Status::kDone);
    CHECK(a.open_paths() == 1);
    net.set_port(both_notice ? *a.nics[1] : *b.nics[1], true);
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 2; }));
    CHECK(a.downs == 0);
    CHECK(b.count(5) == works.size());
  }
}

TEST_CASE("rdma: every cable is pulled, and comes back in time") {
  Net net({});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto src = a.memory(100'000), dst = b.memory(100'000);
  std::vector<Work> works(100);
  net.set_port(*b.nics[0], false);
  for (uint32_t i = 0; i < works.size(); ++i) {
    a.post({a.request(works[i], WorkOp::kWrite, *src, 0, *dst, 1000 * i, 1000, 5)}, [] {});
  }
  poll_until({&a, &b}, [] { return false; }, 0.3);
  CHECK(b.count(5) == 0);
  net.set_port(*b.nics[0], true);
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.count(5) == works.size(); }));
  CHECK(a.downs == 0);
}

TEST_CASE("rdma: a stale descriptor fails its own write, with words; others go on") {
  for (const bool ordered : {true, false}) {
    CAPTURE(ordered);
    Net net({.ordered_paths = ordered, .names_imm_paths = ordered});
    Node a(net, "a"), b(net, "b");
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(8000), good = b.memory(8000), closed = b.memory(8000);
    auto read_only = b.memory(8000, Access::kRemoteRead);
    a.key(*closed);
    b.close(*closed);
    std::vector<Work> works(7);
    const auto write = [&](int i, const Node::Memory& dst, uint64_t offset) {
      return a.request(works[static_cast<size_t>(i)], WorkOp::kWrite, *src, 0, dst, offset, 1000, 1);
    };
    a.post({write(0, *good, 0), write(1, *closed, 3000), write(2, *good, 1000), write(3, *read_only, 0),
            write(4, *good, 7500), write(5, *good, 2000),
            a.request(works[6], WorkOp::kRead, *src, 4000, *read_only, 0, 1000)},
           [&] { a.transport->poll(), b.transport->poll(); });
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }));
    for (const int i : {0, 2, 5, 6}) CHECK(works[static_cast<size_t>(i)].status == Status::kDone);
    CHECK(works[1].status == Status::kRegionClosed);
    CHECK(works[1].detail.find("offset 3000") != std::string::npos);
    CHECK(works[3].status == Status::kAccessDenied);
    CHECK(works[4].status == Status::kOutOfBounds);
    poll_until({&a, &b}, [&] { return b.count(1) == 3; });
    CHECK(b.count(1) == 3);
    CHECK(a.downs == 0);
  }
}

TEST_CASE("rdma: a peer whose operations are refused again and again fails none of its target's") {
  Net net({});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto src = a.memory(8000), dst = b.memory(8000);
  net.change([](NetOptions& options) { options.holds_works = true; });
  std::array<Work, 2> works;
  a.post({a.request(works[0], WorkOp::kWrite, *src, 0, *dst, 0, 1000, 1),
          a.request(works[1], WorkOp::kWrite, *src, 0, *dst, 1000, 1000, 1)},
         [] {});
  const auto& path = *static_cast<RdmaLink*>(a.link)->session->paths.front();
  for (uint32_t round = 1; round <= 20; ++round) {
    CAPTURE(round);
    const auto is_posted = [&] { return path.epochs_opened == round && path.works.size() == 2; };
    REQUIRE(poll_until({&a, &b}, is_posted, 20));
    if (round == 20) net.change([](NetOptions& options) { options.holds_works = false; });
    net.break_all_paths(*a.nics[0], true);
  }
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.count(1) == 2; }, 20));
  for (const Work& work : works) CHECK(work.status == Status::kDone);
  CHECK(a.downs == 0);
}

TEST_CASE("rdma: a work that meets nothing but breaks of the peer's fails in the end, and those behind it are done") {
  Net net({});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto src = a.memory(8000), dst = b.memory(8000);
  net.change([](NetOptions& options) { options.holds_works = true; });
  std::array<Work, 2> works;
  a.post({a.request(works[0], WorkOp::kWrite, *src, 0, *dst, 0, 1000, 1),
          a.request(works[1], WorkOp::kWrite, *src, 0, *dst, 1000, 1000, 2)},
         [] {});
  const auto& path = *static_cast<RdmaLink*>(a.link)->session->paths.front();
  uint32_t breaks = 0;
  for (; works[0].open > 0 && breaks < 100; ++breaks) {
    const auto is_posted = [&] { return path.epochs_opened == breaks + 1 && !path.works.empty(); };
    REQUIRE(poll_until({&a, &b}, is_posted, 20));
    net.break_all_paths(*a.nics[0], true);
    REQUIRE(poll_until({&a, &b}, [&] { return path.works.empty(); }, 20));
    poll_until({&a, &b}, [&] { return path.epochs_opened == breaks + 2; }, 20);
  }
  net.change([](NetOptions& options) { options.holds_works = false; });
  REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }, 20));
  CHECK(breaks > 40);
  CHECK(works[0].status == Status::kTransportFailed);
  CHECK(works[1].status == Status::kDone);
  CHECK(b.count(1) == 0);
}

TEST_CASE("rdma: once a region is known to be closed, nothing that names it costs the path") {
  for (const bool ordered : {true, false}) {
    CAPTURE(ordered);
    Net net({.ordered_paths = ordered, .names_imm_paths = ordered, .path_works_max = 4});
    Node a(net, "a"), b(net, "b");
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(8000), good = b.memory(8000), closed = b.memory(8000);
    a.key(*closed);
    b.close(*closed);
    const auto turn = [&] { a.transport->poll(), b.transport->poll(); };
    // More than the path takes at once: those that wait in the queue are not posted, either.
    Work bad{.open = 20}, fine{.open = 20};
    std::vector<WorkRequest> requests;
    for (int i = 0; i < 20; ++i) {
      requests.push_back(a.request(bad, WorkOp::kWrite, *src, 0, *closed, 0, 100, 1));
      requests.push_back(a.request(fine, WorkOp::kWrite, *src, 0, *good, 0, 100, 2));
    }
    a.post(requests, turn);
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.count(2) == 20; }));
    CHECK(bad.status == Status::kRegionClosed);
    CHECK(fine.status == Status::kDone);
    const auto& path = *static_cast<RdmaLink*>(a.link)->session->paths.front();
    const uint32_t epochs = path.epochs_opened;
    CHECK(epochs <= 3);

    Work again{.open = 10}, on{.open = 10};
    requests.clear();
    for (int i = 0; i < 10; ++i) {
      requests.push_back(a.request(again, WorkOp::kRead, *src, 0, *closed, 0, 100));
      requests.push_back(a.request(on, WorkOp::kWrite, *src, 0, *good, 0, 100, 3));
    }
    a.post(requests, turn);
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0 && b.count(3) == 10; }));
    CHECK(again.status == Status::kRegionClosed);
    CHECK(again.detail.find("the region is closed") != std::string::npos);
    CHECK(on.status == Status::kDone);
    CHECK(path.epochs_opened == epochs);
    CHECK(b.count(1) == 0);
  }
}

TEST_CASE("rdma: where nobody can tell whether an immediate was counted, its write fails; none is counted twice") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    Net net({.seed = seed,
             .ordered_paths = false,
             .names_imm_paths = false,
             .delay_ns_max = 30'000,
             .breaks_before = 0.01,
             .breaks_after = 0.01});
    Node a(net, "a", {.rails = 2, .peer_timeout_ns = 20'000'000'000});
    Node b(net, "b", {.rails = 2, .peer_timeout_ns = 20'000'000'000});
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(200'000), dst = b.memory(200'000);
    std::vector<Work> works(400);
    const auto turn = [&] { a.transport->poll(), b.transport->poll(); };
    for (uint32_t i = 0; i < works.size(); ++i) {
      a.post({a.request(works[i], WorkOp::kWrite, *src, 500 * i, *dst, 500 * i, 500, i % 2 == 0 ? i : kNoImm)}, turn);
    }
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_works == 0; }, 30));
    poll_until({&a, &b}, [] { return false; }, 0.02);
    for (uint32_t i = 0; i < works.size(); ++i) {
      if (i % 2 == 1) CHECK(works[i].status == Status::kDone);
      if (works[i].status == Status::kDone) CHECK(b.count(i) == (i % 2 == 0 ? 1 : 0));
      if (works[i].status != Status::kDone) {
        CHECK(works[i].status == Status::kTransportFailed);
        CHECK(b.count(i) <= 1);
        CHECK(works[i].detail.find("nobody can tell") != std::string::npos);
      }
    }
  }
}

TEST_CASE("rdma: a path that broke at the idle target's end alone is made again before anybody loses a write to it") {
  for (int round = 0; round < 8; ++round) {  // who leads is drawn
    Net net({.ordered_paths = false, .names_imm_paths = false});
    Node a(net, "a"), b(net, "b");
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(100), dst = b.memory(100);
    std::vector<Work> works(2);
    const auto write = [&](int i) {
      a.post({a.request(works[static_cast<size_t>(i)], WorkOp::kWrite, *src, 0, *dst, 0, 100, 1)}, [] {});
    };
    write(0);
    REQUIRE(poll_until({&a, &b}, [&] { return works[0].done() && b.count(1) == 1; }));
    net.break_all_paths(*b.nics[0]);
    const auto& path = *static_cast<RdmaLink*>(a.link)->session->paths.front();
    REQUIRE(poll_until({&a, &b}, [&] { return path.epochs_opened == 2 && path.state == PathState::kOpen; }, 5));
    write(1);
    REQUIRE(poll_until({&a, &b}, [&] { return works[1].done(); }));
    CHECK(works[1].status == Status::kDone);
    CHECK(a.downs == 0);
  }
}

TEST_CASE("rdma: a peer that dies or freezes is lost by the deadline, and everything is retired") {
  for (const bool killed : {true, false}) {
    CAPTURE(killed);
    Net net({});
    Node a(net, "a", {.peer_timeout_ns = 2'500'000'000}), b(net, "b");
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(1000), dst = b.memory(1000);
    if (killed) {
      net.kill(*b.nics[0]);
    } else {
      net.freeze(*b.nics[0], true);
    }
    std::vector<Work> works(100);
    for (Work& work : works) a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 10, 1)}, [] {});
    std::string text = "anybody?";
    Work sent;
    a.send(sent, text, [] {});
    const int64_t began = now_ns();
    bool was_frozen = false;
    REQUIRE(poll_until({&a}, [&] {
      was_frozen = was_frozen || a.frozen;
      return a.downs == 1;
    }));
    CHECK(now_ns() - began < 3'500'000'000);
    CHECK(was_frozen == !killed);
    CHECK(a.down_end == LinkEnd::kLost);
    CHECK(a.open_works == 0);
    for (const Work& work : works) CHECK(work.status == Status::kPeerLost);
    CHECK(sent.status == Status::kPeerLost);
  }
}

TEST_CASE("rdma: a lost peer's NIC that never flushes is given up in the end, and its works are told") {
  struct Quick final : Clock {
    int64_t ahead_ns = 0;
    int64_t now_ns() const override { return crossrail::now_ns() + ahead_ns; }
    void pass() override {}
  } clock;
  Net net({});
  NicPath* given_up = nullptr;  // by everybody but us
  {
    Node b(net, "b");
    Node a(net, "a", {.clock = &clock});
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(1000), dst = b.memory(1000);
    net.change([](NetOptions& options) { options.holds_works = true; });
    a.nics[0]->flushes = false;
    Work work;
    a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 10)}, [] {});
    given_up = static_cast<RdmaLink*>(a.link)->session->paths.front()->nic_path.get();
    b.transport->close();  // says goodbye
    const auto is_lost = [&] {
      clock.ahead_ns += 20'000'000;  // no absence: the clock is looked at in every 16th poll
      return a.downs == 1;
    };
    REQUIRE(poll_until({&a}, is_lost));
    CHECK(work.status == Status::kPeerLost);
    CHECK(a.errors.size() == 1);
  }
  delete given_up;
}

TEST_CASE("rdma: a port that was opened while it was down, and is faster now, is so at both ends") {
  for (int round = 0; round < 4; ++round) {  // who leads is drawn
    Net net({});
    Node a(net, "a", {.rails = 2, .speeds = {100'000, 10'000}}),
        b(net, "b", {.rails = 2, .speeds = {100'000, 100'000}});
    net.set_port(*a.nics[1], false);
    a.connect(b);
    b.connect(a);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && b.ups == 1; }));
    net.set_speed(*a.nics[1], 100'000);
    net.set_port(*a.nics[1], true);
    REQUIRE(poll_until({&a, &b}, [&] { return a.open_paths() == 2 && b.open_paths() == 2; }));
    for (const Node* node : {&a, &b}) {
      for (const auto& path : static_cast<RdmaLink*>(node->link)->session->paths) {
        CHECK(path->speed_mbps == 100'000);
        CHECK(path->window_bytes == 4 << 20);
      }
    }
  }
}

TEST_CASE("rdma: a peer is lost as soon as nobody is at any of its endpoints, and not before") {
  Net net({.tells_nobody = true});
  const NodeOptions patient{.rails = 2, .peer_timeout_ns = 60'000'000'000, .connect_timeout_ns = 60'000'000'000};
  Node a(net, "a", patient), b(net, "b", patient);
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  const auto kill = [&](size_t rail) {
    net.kill(*b.nics[rail]);
    net.break_all_paths(*a.nics[rail]);
  };
  kill(0);
  const int64_t enough = now_ns() + 200'000'000;
  REQUIRE(poll_until({&a, &b}, [&] { return now_ns() > enough; }));
  CHECK(a.downs == 0);

  kill(1);
  auto src = a.memory(1000), dst = b.memory(1000);
  Work last;
  a.post({a.request(last, WorkOp::kWrite, *src, 0, *dst, 0, 10, 1)}, [] {});
  REQUIRE(poll_until({&a}, [&] { return a.downs == 1; }));
  CHECK(last.status == Status::kPeerLost);
  CHECK(a.down_reason.find("nobody is at its address") != std::string::npos);

  Node c(net, "c", patient);
  c.link = c.transport->connect(std::make_shared<const Address>(b.transport->address()));
  REQUIRE(poll_until({&c}, [&] { return c.downs == 1; }));
}

TEST_CASE("rdma: a peer that closes says goodbye") {
  Net net({});
  Node a(net, "a");
  {
    Node b(net, "b");
    a.connect(b);
    b.connect(a);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && b.ups == 1; }));
  }
  REQUIRE(poll_until({&a}, [&] { return a.downs == 1; }));
  CHECK(a.down_end == LinkEnd::kLeft);
  CHECK(a.down_reason.find("closed") != std::string::npos);
}

TEST_CASE("rdma: forgetting a peer retires everything at once, leaves its own operations alone, and can be undone") {
  Net net({.delay_ns_max = 200'000});
  Node a(net, "a", {.rails = 2}), b(net, "b", {.rails = 2});
  a.connect(b);
  b.connect(a);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && b.ups == 1; }));
  auto in_a = a.memory(100'000), in_b = b.memory(100'000);
  std::vector<Work> ours(300), theirs(300);
  const auto turn = [&] { a.transport->poll(), b.transport->poll(); };
  for (uint32_t i = 0; i < 300; ++i) {
    a.post({a.request(ours[i], WorkOp::kWrite, *in_a, 0, *in_b, 0, 100, 1)}, turn);
    b.post({b.request(theirs[i], WorkOp::kWrite, *in_b, 0, *in_a, 100 * i, 100, 2)}, turn);
  }
  a.disconnect();
  CHECK(a.open_works == 0);
  for (const Work& work : ours) CHECK((work.status == Status::kDone || work.status == Status::kPeerLost));
  REQUIRE(poll_until({&a, &b}, [&] { return b.open_works == 0; }));
  for (const Work& work : theirs) CHECK(work.status == Status::kDone);
  REQUIRE(poll_until({&a, &b}, [&] { return a.count(2) == 300; }));
  CHECK(b.downs == 0);

  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 2; }));
  Work again;
  a.post({a.request(again, WorkOp::kWrite, *in_a, 0, *in_b, 0, 100, 3)}, turn);
  REQUIRE(poll_until({&a, &b}, [&] { return again.done() && b.count(3) == 1; }));
  CHECK(again.status == Status::kDone);

  a.disconnect();
  b.disconnect();
  REQUIRE(poll_until({&a, &b}, [&] { return a.transport->session_count() == 0 && b.transport->session_count() == 0; }));
  CHECK(net.paths.empty());
  b.connect(a);
  REQUIRE(poll_until({&a, &b}, [&] { return b.ups == 2; }));
}

TEST_CASE("rdma: late datagrams keep no session that neither side needs") {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    Net net({.seed = seed, .datagram_doubling = 1, .datagram_delay_ns_max = 90'000'000});
    Node a(net, "a"), b(net, "b");
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    a.disconnect();  // the doubles of what asked for the path are still under way
    const auto are_gone = [&] { return a.transport->session_count() == 0 && b.transport->session_count() == 0; };
    REQUIRE(poll_until({&a, &b}, are_gone));
    CHECK(net.paths.empty());
  }
}

TEST_CASE("rdma: closing retires what is under way, and the peer forgets an engine that vanished") {
  Net net({.delay_ns_max = 10'000'000});
  Node b(net, "b", {.peer_timeout_ns = 100'000'000});
  auto dst = b.memory(100'000);
  std::vector<Work> works(200);
  {
    Node a(net, "a");
    a.connect(b);
    REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
    auto src = a.memory(100'000);
    for (Work& work : works) a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 100, 1)}, [] {});
    net.kill(*b.nics[0]);  // hears no goodbye
    a.transport->close();
    for (const Work& work : works) CHECK(work.done());
  }
  {
    std::lock_guard guard(net.lock);
    b.nics[0]->killed = false;
  }
  net.break_all_paths(*b.nics[0]);
  REQUIRE(poll_until({&b}, [&] { return b.transport->session_count() == 0; }));
}

TEST_CASE("rdma: a wait for paths to be flushed is told to the NICs") {
  Net net({.holds_works = true});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto src = a.memory(100), dst = b.memory(100);
  Work work;
  a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 100)}, [] {});
  CHECK(a.nics[0]->hurried == 0);
  a.disconnect();
  CHECK(a.nics[0]->hurried == 1);
  CHECK(work.status == Status::kPeerLost);
}

}  // namespace crossrail::rdma::test
