// The verbs NIC on a device that fails: works, paths, neighbours and queues, and its own end.
#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#if CROSSRAIL_WITH_VERBS

#include "transport/verbs/queues.h"
#include "util/errors.h"
#include "verbs_rig.h"

using namespace crossrail;
using rdma::NicFault;
using rdma::NicWork;
using verbs_test::Fake;
using verbs_test::open_fake;
using verbs_test::Rig;
using verbs_test::Told;

TEST_CASE("verbs faults: a work that fails lets those before it be done and flushes those behind") {
  Fake fake;
  Rig rig;
  CHECK(rig.paths[0]->post(rig.writes(100)) == 100);
  fake.complete(rig.works_of(*rig.paths[0]), 40);
  rig.nic->poll(rig.told);
  CHECK(rig.told.done == 32);  // the last signalled one of those
  fake.complete(rig.works_of(*rig.paths[0]), 3, IBV_WC_REM_ACCESS_ERR);
  rig.nic->poll(rig.told);
  CHECK(rig.told.done == 42);
  CHECK(rig.told.broken == 1);
  rig.paths[0]->break_off("test");
  rig.poll_for_ms(30);
  CHECK(rig.told.flushed == 1);
  REQUIRE(rig.told.failed.size() == 58);
  CHECK(rig.told.failed[0] == std::pair<uint64_t, NicFault>(42, NicFault::kRemoteAccess));
  CHECK(rig.told.failed[57] == std::pair<uint64_t, NicFault>(99, NicFault::kFlushed));
}

TEST_CASE("verbs faults: neighbours that do not answer keep nobody waiting who does") {
  constexpr auto kSilence = std::chrono::seconds(1);
  constexpr uint8_t kSilent = 16;
  Fake fake;
  std::atomic<int> asked_in_vain = 0;
  fake.find_route = [&](const ibv_ah_attr& route) -> ibv_ah* {
    if (route.grh.dgid.raw[14] == 0) return new ibv_ah{};
    ++asked_in_vain;
    std::this_thread::sleep_for(kSilence);
    return nullptr;
  };
  const auto nic = open_fake();
  Told told;
  const auto endpoint = [&](uint8_t group, uint8_t host) {
    verbs::Endpoint made = *verbs::decode_endpoint(nic->endpoint());
    made.gid[14] = group;
    made.gid[15] = host;
    return verbs::encode(made);
  };
  const std::vector<uint8_t> bytes(10);
  const auto seconds_until_sent = [&](const std::vector<uint8_t>& to) {
    const uint64_t before = fake.posted_count;
    const int64_t since = now_ns();
    nic->send_datagram(to, bytes);
    while (fake.posted_count == before && now_ns() - since < 10'000'000'000) nic->poll(told);
    return static_cast<double>(now_ns() - since) / 1e9;
  };
  for (uint8_t i = 0; i < kSilent; ++i) nic->send_datagram(endpoint(1, i), bytes);
  // Behind those that nobody knew to be silent: eight at a time.
  CHECK(seconds_until_sent(endpoint(0, 7)) < kSilent / 4);
  const Deadline all_asked = deadline_in(20);
  while (asked_in_vain < kSilent && now_ns() < all_asked) nic->poll(told);
  // They are asked for again all the time, and keep two threads.
  const Deadline end = deadline_in(2.0);
  while (now_ns() < end) {
    for (uint8_t i = 0; i < kSilent; ++i) nic->send_datagram(endpoint(1, i), bytes);
    nic->poll(told);
  }
  CHECK(asked_in_vain < kSilent + 10);
  for (uint8_t i = 10; i < 20; ++i) CHECK(seconds_until_sent(endpoint(0, i)) < 0.9);
}

TEST_CASE("verbs faults: peers that stand still leave room for messages to others") {
  Fake fake;
  Rig rig;
  const std::vector<uint8_t> message(1000), sign(10);
  const auto send_all = [&](rdma::NicPath& path) {
    uint32_t sent = 0;
    while (path.send(message, {})) ++sent;
    return sent;
  };
  for (int i = 0; i < 6; ++i) send_all(rig.add_path());  // none of it completes
  rdma::NicPath& healthy = *rig.paths[0];
  CHECK(send_all(healthy) == verbs::kPathFragments);
  fake.complete(rig.messages_of(healthy), 1);
  rig.nic->poll(rig.told);
  CHECK(healthy.send(message, {}));
}

TEST_CASE("verbs faults: however many peers stand still, there is room for works and signs of life to others") {
  Fake fake;
  Rig rig;
  const std::vector<uint8_t> message(1000), sign(10);
  for (int i = 0; i < 300; ++i) {
    rdma::NicPath& path = rig.add_path();
    CHECK(path.post(rig.writes(verbs::kPathWorks)) > 0);
    while (path.send(message, {})) {
    }
    while (path.send(sign, {})) {
    }
  }
  rdma::NicPath& healthy = *rig.paths[0];
  for (uint64_t round = 0; round < 3; ++round) {
    CHECK(healthy.post(rig.writes(1, round)) == 1);
    CHECK(healthy.send(message, {}));
    CHECK(healthy.send(sign, {}));
    fake.complete(rig.works_of(healthy), 1);
    fake.complete(rig.messages_of(healthy), 2);
    rig.nic->poll(rig.told);
    CHECK(rig.told.done == round + 1);
    CHECK(healthy.is_sent());
  }
}

TEST_CASE("verbs faults: a NIC that numbers its arming wakes a sleeper each time") {
  Fake fake;
  Rig rig;
  rdma::NicPath& path = *rig.paths[0];
  bool is_late = false, sleeps = true;
  SUBCASE("woken by each ring") {}
  SUBCASE("woken by a ring that comes to the channel late") { is_late = true; }
  SUBCASE("found the completion before it slept") { sleeps = false; }
  SUBCASE("found it before it slept, and the ring comes late") {
    is_late = true;
    sleeps = false;
  }
  const auto is_readable = [&] {
    pollfd entry{rig.nic->fds().at(0), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  };
  for (uint64_t round = 0; round < 40; ++round) {
    CAPTURE(round);
    rig.nic->arm();
    REQUIRE(!rig.nic->has_arrivals());
    if (is_readable()) {  // by an old ring: looked into, and armed again
      rig.nic->hush();
      rig.nic->poll(rig.told);
      rig.nic->arm();
      REQUIRE(!is_readable());
    }
    REQUIRE(path.post(rig.writes(1, round)) == 1);
    fake.complete(rig.works_of(path), 1);
    REQUIRE(fake.ring(&verbs_test::g_sends));
    if (!is_late) fake.deliver_ring(&verbs_test::g_sends);
    if (sleeps && !is_late) {
      REQUIRE(is_readable());
      rig.nic->hush();
    }
    rig.nic->poll(rig.told);
    REQUIRE(rig.told.done == round + 1);
    if (!is_late) continue;
    if (sleeps) rig.nic->arm();  // before the ring is there
    fake.deliver_ring(&verbs_test::g_sends);
    if (!sleeps) continue;
    REQUIRE(is_readable());
    rig.nic->hush();
    rig.nic->poll(rig.told);
  }
}

TEST_CASE("verbs faults: what the peer did, and the device answers by breaking the path, is not blamed on ours") {
  Fake fake;
  Rig rig;
  rdma::NicPath& path = *rig.paths[0];
  bool by_peer = true;
  SUBCASE("works flushed without a failure of ours") {
    CHECK(path.post(rig.writes(2)) == 2);
    fake.complete(rig.works_of(path), 1, IBV_WC_WR_FLUSH_ERR);
  }
  SUBCASE("a fragment flushed") {
    const std::vector<uint8_t> head(1000);
    CHECK(path.send(head, {}));
    fake.complete(rig.messages_of(path), 1, IBV_WC_WR_FLUSH_ERR);
  }
  SUBCASE("access denied to the peer") { fake.tell(IBV_EVENT_QP_ACCESS_ERR, &rig.works_of(path).qp); }
  SUBCASE("a request of the peer that makes no sense") { fake.tell(IBV_EVENT_QP_REQ_ERR, &rig.works_of(path).qp); }
  SUBCASE("a work without an answer") {
    by_peer = false;
    CHECK(path.post(rig.writes(2)) == 2);
    fake.complete(rig.works_of(path), 1, IBV_WC_RETRY_EXC_ERR);
  }
  SUBCASE("a fragment without an answer") {
    by_peer = false;
    const std::vector<uint8_t> head(1000);
    CHECK(path.send(head, {}));
    fake.complete(rig.messages_of(path), 1, IBV_WC_RETRY_EXC_ERR);
  }
  SUBCASE("the queue pair's own end") {
    by_peer = false;
    fake.tell(IBV_EVENT_QP_FATAL, &rig.works_of(path).qp);
  }
  rig.poll_for_ms(5);
  CHECK(rig.told.broken == 1);
  CHECK(rig.told.broken_by_peer == (by_peer ? 1 : 0));
}

TEST_CASE("verbs faults: a device that gives nothing back is not waited for longer than two seconds") {
  Fake fake;
  fake.flushes = fake.says_idle = false;
  Rig rig;
  CHECK(rig.paths[0]->post(rig.writes(10)) == 10);
  const int64_t broken_ns = now_ns();
  rig.paths[0]->break_off("test");
  rig.nic->poll(rig.told);
  if (rig.told.flushed == 0)
    CHECK(rig.nic->next_timer() != kNoDeadline);  // else this thread was not scheduled for so long
  while (rig.told.flushed == 0 && now_ns() - broken_ns < 20'000'000'000) rig.nic->poll(rig.told);
  CHECK(now_ns() - broken_ns >= 2'000'000'000);
  CHECK(rig.told.flushed == 1);
  CHECK(rig.told.failed.size() == 10);
  CHECK(rig.told.broken == 0);
  CHECK(rig.nic->next_timer() == kNoDeadline);
  // The room of those ten, which is there once the queue was seen empty, is told by itself.
  CHECK(rig.nic->poll(rig.told) == 1);
  CHECK(rig.nic->poll(rig.told) == 0);
}

TEST_CASE("verbs faults: one queue pair that is said to be idle twice is not taken for both") {
  Fake fake;
  fake.says_idle = false;
  Rig rig;
  const Deadline believed = deadline_in(0.05);  // by then it is taken for granted
  ibv_qp* const messages = &rig.messages_of(*rig.paths[0]).qp;
  ibv_qp* const works = &rig.works_of(*rig.paths[0]).qp;
  rig.paths[0]->break_off("test");
  fake.tell(IBV_EVENT_QP_LAST_WQE_REACHED, messages);
  fake.tell(IBV_EVENT_QP_LAST_WQE_REACHED, messages);
  rig.poll_for_ms(5);
  const int flushed = rig.told.flushed;
  if (now_ns() < believed) CHECK(flushed == 0);  // else this thread was not scheduled
  if (flushed == 0) fake.tell(IBV_EVENT_QP_LAST_WQE_REACHED, works);
  rig.poll_for_ms(5);
  CHECK(rig.told.flushed == 1);
}

TEST_CASE("verbs faults: a receive that a device in software forgets with a path is made up for") {
  Fake fake;
  Rig rig;
  const auto end_path = [&] {
    const int flushed = rig.told.flushed;
    rig.add_path().break_off("test");
    const Deadline deadline = deadline_in(10);
    while (rig.told.flushed == flushed && now_ns() < deadline) rig.nic->poll(rig.told);
    REQUIRE(rig.told.flushed == flushed + 1);
  };
  fake.receives_room = 0;
  const uint64_t before = fake.receives_posted;
  for (int i = 0; i < 5; ++i) end_path();
  CHECK(fake.receives_posted == before);
  for (uint64_t lost = 1; lost <= 600; ++lost) {  // more than there were
    fake.receives_room = 1;
    end_path();
    rig.nic->poll(rig.told);
    CHECK(fake.receives_posted == before + lost);
  }
}

TEST_CASE("verbs faults: what a path has received is told, however late anybody looks") {
  Fake fake;
  Rig rig;
  constexpr size_t kImms = 1000;  // more than one poll takes
  for (size_t i = 0; i < kImms; ++i) {
    fake.receives.push_back(verbs_test::completion_of(verbs::tagged(verbs::Tag::kImmReceive, 0, 0),
                                                      rig.works_of(*rig.paths[0]).qp, IBV_WC_SUCCESS));
    fake.receives.back().opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  }
  rig.paths[0]->break_off("test");

  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // longer than a path is waited for
  rig.poll_for_ms(30);

  CHECK(rig.told.flushed == 1);
  CHECK(rig.told.imms.size() == kImms);
}

TEST_CASE("verbs faults: the end of the device ends every path, without anybody's help") {
  Fake fake;
  fake.flushes = false;
  Rig rig;
  rig.add_path();
  CHECK(rig.paths[0]->post(rig.writes(10)) == 10);
  rig.paths[1]->break_off("before");
  fake.tell(IBV_EVENT_DEVICE_FATAL);
  rig.poll_for_ms(5);
  CHECK(!rig.told.fatal.empty());
  CHECK(rig.told.broken == 1);
  CHECK(rig.told.flushed == 2);
  CHECK(rig.told.failed.size() == 10);
  CHECK(rig.paths[0]->post(rig.writes(1, 10)) == 0);
  CHECK_THROWS_AS(rig.nic->make_path(), TransportError);
  rig.nic->send_datagram(rig.nic->endpoint(), {});
  CHECK(!rig.nic->is_port_up());
}

TEST_CASE("verbs faults: a refused post breaks the path, and what was taken comes back") {
  Fake fake;
  Rig rig;
  fake.posts_until_error = 5;
  CHECK(rig.paths[0]->post(rig.writes(10)) == 5);
  CHECK(rig.nic->has_arrivals());
  rig.nic->poll(rig.told);
  CHECK(rig.told.broken == 1);
  rig.paths[0]->break_off("test");
  rig.poll_for_ms(30);
  CHECK(rig.told.failed.size() == 5);
  CHECK(rig.told.flushed == 1);
}

TEST_CASE("verbs faults: all paths together never have more posted than the completion queue holds") {
  Fake fake;
  Rig rig;
  for (int i = 0; i < 1200; ++i) rig.add_path();
  for (const auto& path : rig.paths) path->post(rig.writes(verbs::kPathWorks));
  CHECK(fake.posted_count == verbs::kSendsOutstanding);
  const uint8_t byte = 1;
  CHECK(!rig.paths.back()->send({&byte, 1}, {}));
  fake.complete(rig.works_of(*rig.paths[0]), verbs::kPathWorks);
  rig.nic->poll(rig.told);
  CHECK(rig.paths.back()->post(rig.writes(verbs::kPathWorks)) == verbs::kPathWorksKept);
  CHECK(rig.paths.back()->send({&byte, 1}, {}));
}

TEST_CASE("verbs faults: the longest work, more than 4 GiB into a region, is posted as it is") {
  Fake fake;
  Rig rig;
  const uint64_t length = rig.nic->limits().work_bytes_max;
  REQUIRE(length <= UINT32_MAX);
  auto works = rig.writes(1);
  works[0].length_bytes = length;
  works[0].has_remote = true;
  works[0].remote_address = (uint64_t{5} << 32) + 4096;
  REQUIRE(rig.paths[0]->post(works) == 1);
  CHECK(fake.last_entry.length == length);
  CHECK(fake.last_remote_address == (uint64_t{5} << 32) + 4096);
}

TEST_CASE("verbs faults: as many writes share a doorbell as the option says") {
  constexpr uint32_t kCount = 40;
  for (const uint32_t chain_length : {1, 2, 7, 16, 32}) {
    CAPTURE(chain_length);
    Fake fake;
    RdmaOptions options;
    options.chain_length = chain_length;
    Rig rig(nullptr, options);
    const uint64_t before = fake.doorbells;
    REQUIRE(rig.paths[0]->post(rig.writes(kCount)) == kCount);
    CHECK(fake.doorbells - before == (kCount + chain_length - 1) / chain_length);
    fake.complete(rig.works_of(*rig.paths[0]), kCount);
    rig.nic->poll(rig.told);
    CHECK(rig.told.done == kCount);
  }
}

TEST_CASE("verbs faults: what a destroyed path had posted is let go of once the queue was seen empty") {
  Fake fake;
  Rig rig;
  for (int round = 1; round <= 80; ++round) {  // more than the queue holds at once
    rdma::NicPath& path = rig.add_path();
    CHECK(path.post(rig.writes(verbs::kPathWorks)) == verbs::kPathWorks);
    path.break_off("test");
    const Deadline deadline = deadline_in(10);
    while (rig.told.flushed < round && now_ns() < deadline) rig.nic->poll(rig.told);
    REQUIRE(rig.told.flushed == round);
    rig.paths.pop_back();
  }
}

TEST_CASE("verbs faults: what posting costs by itself") {
  for (const uint32_t chain_length : {1, 2, 4, 8, 16, 32}) {
    Fake fake;
    fake.is_sink = true;
    RdmaOptions options;
    options.chain_length = chain_length;
    Rig rig(nullptr, options);
    constexpr uint64_t kBatch = 32;  // as many as a path is handed at once
    double best_ns = 1e9;
    uint64_t cookie = 0;
    for (int round = 0; round < 1000; ++round) {
      auto works = rig.writes(kBatch, cookie);
      for (NicWork& work : works) work.length_bytes = 8192;
      const int64_t begin = now_ns();
      REQUIRE(rig.paths[0]->post(works) == kBatch);
      const double ns = static_cast<double>(now_ns() - begin) / kBatch;
      best_ns = std::min(best_ns, ns);
      cookie += kBatch;
      rig.nic->poll(rig.told);
      REQUIRE(rig.told.done == cookie);
    }
    MESSAGE("chains of " << chain_length << ": one write of a page: " << best_ns << " ns");
  }
}

#endif
