// The rdma layer with a thread per engine, each sleeping when idle: what ThreadSanitizer looks at, and lost wake-ups
// show in.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>

#include "rdma_node.h"
#include "transport/sleep.h"

namespace crossrail::rdma::test {

namespace {

using Work = Node::Work;

// As an engine's worker does: polls while something moves, then arms, looks once more, sleeps.
void turn_or_sleep(Node& node, SleepingPlace& place, int* idle) {
  node.transport->disarm();
  if (node.transport->poll() > 0) {
    *idle = 0;
    return;
  }
  if (++*idle < 20) return;
  node.transport->arm();
  if (node.transport->has_arrivals()) return;
  place.sleep_behind(std::min(node.transport->next_timer(), deadline_in(0.5)));
}

}  // namespace

TEST_CASE("rdma: engines on threads of their own, under faults, while others register and close regions") {
  Net net({.seed = 7,
           .delay_ns_max = 50'000,
           .datagram_loss = 0.1,
           .datagram_delay_ns_max = 500'000,
           .breaks_before = 0.003,
           .breaks_after = 0.003,
           .refuses_post = 0.05});
  const NodeOptions options{.rails = 2, .peer_timeout_ns = 30'000'000'000, .connect_timeout_ns = 10'000'000'000};
  Node a(net, "a", options), b(net, "b", options);
  a.connect(b);
  b.connect(a);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1 && b.ups == 1; }));
  constexpr uint32_t kWorks = 600;
  std::atomic<int> running{2};
  const auto drive = [&](Node& node, Node::Memory& src, Node::Memory& dst, uint32_t imm, int* failed) {
    std::vector<Work> works(kWorks);
    std::string text(3000, 'x');
    std::vector<Work> sends(50);
    int idle = 0;
    Transport* const transports[] = {node.transport.get()};
    SleepingPlace place(transports);
    const auto turn = [&] { turn_or_sleep(node, place, &idle); };
    for (uint32_t i = 0; i < kWorks; ++i) {
      node.post({node.request(works[i], WorkOp::kWrite, src, 500 * i, dst, 500 * i, 500, imm)}, turn);
      if (i % 12 == 0) node.send(sends[i / 12], text, turn);
    }
    const int64_t end = deadline_in(60);
    bool counted = false;
    while (running.load() > 0 && now_ns() < end) {
      turn();
      const bool all = node.open_works == 0 && node.count(imm) == kWorks && node.messages.size() == 50;
      if (all && !std::exchange(counted, true)) {
        --running;
        if (running.load() == 0) node.transport->wake();
      }
    }
    for (const Work& work : works) *failed += work.status != Status::kDone;
    for (const Work& work : sends) *failed += work.status != Status::kDone;
    *failed += counted ? 0 : 1;
  };
  auto src_a = a.memory(500 * kWorks), dst_a = a.memory(500 * kWorks);
  auto src_b = b.memory(500 * kWorks), dst_b = b.memory(500 * kWorks);
  int failed_a = 0, failed_b = 0;
  std::thread on_a([&] { drive(a, *src_a, *dst_b, 5, &failed_a); });
  std::thread on_b([&] { drive(b, *src_b, *dst_a, 5, &failed_b); });
  std::thread registrar([&] {
    std::vector<std::byte> bytes(4096);
    for (uint64_t i = 0; running.load() > 0; ++i) {
      auto region =
          a.transport->register_memory((i + 1) << 16 | 5000, bytes.data(), bytes.size(), Access::kRemoteWrite);
      a.transport->revoke_region(*region);
      while (!a.transport->is_region_quiet(*region)) std::this_thread::yield();
      region.reset();
      b.transport->wake();
    }
  });
  on_a.join();
  on_b.join();
  registrar.join();
  CHECK(failed_a == 0);
  CHECK(failed_b == 0);
  CHECK(a.downs + b.downs == 0);
}

TEST_CASE("rdma: a sleeper is woken by what arrives, not by its deadline") {
  Net net({.seed = 9});
  Node a(net, "a"), b(net, "b");
  a.connect(b);
  REQUIRE(poll_until({&a, &b}, [&] { return a.ups == 1; }));
  auto src = a.memory(100), dst = b.memory(100);
  std::atomic<int> seen{0};
  std::atomic<bool> stop{false};
  Transport* const transports[] = {b.transport.get()};
  SleepingPlace place(transports);
  std::thread sleeper([&] {
    while (!stop.load()) {
      b.transport->disarm();
      while (b.transport->poll() > 0) {
      }
      seen.store(static_cast<int>(b.count(1)));
      b.transport->arm();
      if (b.transport->has_arrivals()) continue;
      place.sleep_behind(deadline_in(5));
    }
  });
  const int64_t began = now_ns();
  for (int i = 1; i <= 200; ++i) {
    Work work;
    a.post({a.request(work, WorkOp::kWrite, *src, 0, *dst, 0, 100, 1)}, [] {});
    while (!work.done() || seen.load() < i) {
      a.transport->poll();
      REQUIRE(now_ns() - began < 20'000'000'000);
    }
  }
  CHECK(now_ns() - began < 4'000'000'000);
  stop.store(true);
  place.call_behind();
  sleeper.join();
}

}  // namespace crossrail::rdma::test
