// Two engines in one process: regions, peers and engines that end while threads are at work with them.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "engine/core.h"
#include "engine/engine.h"
#include "engine/service_wire.h"
#include "engine_pair.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::test {

TEST_CASE("recycled transfers hold on to no peer that was forgotten") {
  Pair pair;
  RegionRef src = pair.a->alloc(4096, false);
  RegionRef dst = pair.b->alloc(4096, false);
  PeerRef peer = pair.a->peer(pair.b->address());
  {
    const RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
    const std::array<RemoteRegion*, 2> targets{remote.get(), remote.get()};
    const std::array<uint64_t, 2> offsets{0, 8}, lengths{8, 8};
    std::vector<TransferRef> transfers;
    for (int i = 0; i < 100; ++i) {
      transfers.push_back(pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8}));
      transfers.push_back(pair.a->submit_scatter(
          {.src = src.get(), .dsts = targets, .src_offsets = offsets, .dst_offsets = offsets, .lengths = lengths}));
    }
    for (const TransferRef& transfer : transfers) require_done(transfer);
  }
  pair.a->forget_peer(*peer);
  const Deadline deadline = deadline_in(20);
  while (!peer->is_only_ref() && now_ns() < deadline) std::this_thread::yield();
  CHECK(peer->is_only_ref());
}

TEST_CASE("peers' regions that nobody uses any more are forgotten, those in use are not") {
  Pair pair;
  RegionRef src = pair.a->alloc(4096, false);
  RegionRef kept = pair.b->alloc(4096, false);
  RemoteRegionRef in_use = pair.a->remote_region(kept->descriptor());
  PeerRef peer = pair.a->peer(pair.b->address());
  const auto known = [&] { return pair.a->core().peer_table().region_count(); };
  size_t most = 0;
  for (int i = 0; i < 5000; ++i) {
    RegionRef dst = pair.b->alloc(4096, false);
    RemoteRegionRef there = pair.a->remote_region(dst->descriptor());
    require_done(pair.a->submit_write({.src = src.get(), .dst = there.get(), .length_bytes = 8}));
    there = nullptr;
    REQUIRE(dst->close(deadline_in(20), {}) == WaitResult::kReady);
    most = std::max(most, known());
  }
  // Recycled transfers hold on to a few.
  CHECK(most <= 1024);
  CHECK(pair.a->explain(*peer).paths.size() <= 1024 + 1);
  CHECK(pair.a->remote_region(kept->descriptor()).get() == in_use.get());
  require_done(pair.a->submit_write({.src = src.get(), .dst = in_use.get(), .length_bytes = 8}));
}

TEST_CASE("peers are forgotten once they were lost, while other threads look at peers and make new ones") {
  EngineRef engine = open_engine("stays");
  RegionRef src = engine->alloc(64, false);
  std::atomic<bool> stop{false};
  std::thread looker([&] {
    while (!stop.load()) {
      for (const PeerRef& peer : engine->peers()) engine->explain(*peer);
      engine->traffic(60'000'000'000);
    }
  });
  const auto meet = [&](int count) {
    for (int i = 0; i < count; ++i) {
      EngineRef passing = open_engine("passes by");
      RegionRef dst = passing->alloc(64, false);
      RemoteRegionRef there = engine->remote_region(dst->descriptor());
      TransferRef transfer = engine->submit_write({.src = src.get(), .dst = there.get(), .length_bytes = 64});
      transfer->wait(deadline_in(20), {});
      CHECK(transfer->status() == Status::kDone);
      passing->close(0);
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) threads.emplace_back(meet, 150);
  for (std::thread& thread : threads) thread.join();
  stop.store(true);
  looker.join();
  // Whom the looker had named at the wrong moments goes with the next look at the table, 64 peers from the last.
  meet(70);
  CHECK(engine->peers().size() <= 192);
  engine->close(0);
}

TEST_CASE("traffic of an engine whose holder hangs is told without what only that one knows") {
  Pair pair;
  RegionRef src = pair.a->alloc(4096, false);
  RegionRef dst = pair.b->alloc(4096, false);
  const RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  require_done(pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8}));
  std::atomic<bool> hangs{false}, stop{false};
  std::thread holder([&] {
    pair.a->core().run_as_holder([&] {
      hangs.store(true);
      const Deadline deadline = deadline_in(60);
      while (!stop.load() && now_ns() < deadline) std::this_thread::yield();
    });
  });
  while (!hangs.load()) std::this_thread::yield();
  const int64_t began = now_ns();
  const TrafficReport report = pair.a->traffic(20'000'000);
  CHECK(now_ns() - began < 20'000'000'000);
  stop.store(true);
  holder.join();
  CHECK(report.hangs);
  CHECK(!report.is_whole);
  REQUIRE(report.peers.size() == 1);
  CHECK(report.peers[0].paths.empty());
  CHECK(report.peers[0].counts.works == 1);
  const TrafficReport after = pair.a->traffic(60'000'000'000);
  CHECK(!after.hangs);
  CHECK(after.is_whole);
  REQUIRE(after.peers.size() == 1);
  CHECK(!after.peers[0].paths.empty());
}

TEST_CASE("a holder that hangs in an engine without peers is told as well") {
  EngineRef engine = open_engine("alone");
  std::atomic<bool> hangs{false}, stop{false};
  std::thread holder([&] {
    engine->core().run_as_holder([&] {
      hangs.store(true);
      const Deadline deadline = deadline_in(60);
      while (!stop.load() && now_ns() < deadline) std::this_thread::yield();
    });
  });
  while (!hangs.load()) std::this_thread::yield();
  const TrafficReport report = engine->traffic(20'000'000);
  stop.store(true);
  holder.join();
  CHECK(report.hangs);
  CHECK(!report.is_whole);
  CHECK(report.peers.empty());
  const TrafficReport after = engine->traffic(60'000'000'000);
  CHECK(!after.hangs);
  CHECK(after.is_whole);
  engine->close(0);
}

TEST_CASE("an engine that makes rounds does not hang, though its holder lets nobody in") {
  Pair pair;
  RegionRef src = pair.a->alloc(64, false);
  RegionRef dst = pair.b->alloc(64, false);
  const RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  require_done(pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8}));
  std::atomic<bool> stop{false}, holds{false};
  std::thread holder([&] {
    pair.a->core().run_as_holder([&] {
      holds.store(true);
      const Deadline deadline = deadline_in(60);
      while (!stop.load() && now_ns() < deadline) {
        pair.a->core().make_round();
        std::this_thread::yield();
      }
    });
  });
  while (!holds.load()) std::this_thread::yield();
  const TrafficReport report = pair.a->traffic(200'000'000);
  stop.store(true);
  holder.join();
  CHECK(!report.hangs);
  CHECK(!report.is_whole);
}

TEST_CASE("a region closes behind the last copy of a peer that its engine has not noticed yet") {
  EngineRef a = open_engine("a");
  EngineRef b = open_engine("b", 1, Polling::kManual);  // nobody drives it before the close
  constexpr uint64_t kBytes = 4 << 20;
  for (int round = 0; round < 20; ++round) {
    RegionRef src = a->alloc(kBytes, true);
    RegionRef dst = b->alloc(kBytes, true);
    RemoteRegionRef remote = a->remote_region(dst->descriptor());
    std::atomic<int> done{0};
    std::thread writer([&] {
      for (;;) {
        TransferRef sent = a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kBytes});
        REQUIRE(sent->wait(deadline_in(20), {}) == WaitResult::kReady);
        if (sent->status() != Status::kDone) return;
        ++done;
      }
    });
    while (done < 2) std::this_thread::yield();
    REQUIRE(dst->close(deadline_in(20), {}) == WaitResult::kReady);
    std::memset(dst->base(), 0x5a, kBytes);
    writer.join();
    const auto* bytes = reinterpret_cast<const unsigned char*>(dst->base());
    REQUIRE(std::all_of(bytes, bytes + kBytes, [](unsigned char byte) { return byte == 0x5a; }));
    a->forget_peer(*remote->peer());  // so that each round begins with a link that b does not know
    b->close(0);
    b = open_engine("b", 1, Polling::kManual);
  }
  a->close(0);
  b->close(0);
}

TEST_CASE("closing under load completes every transfer and wakes every waiter") {
  for (int round = 0; round < 20; ++round) {
    auto pair = std::make_unique<Pair>(2, 2);
    RegionRef src = pair->a->alloc(1 << 20, false);
    RegionRef dst = pair->b->alloc(1 << 20, false);
    RemoteRegionRef remote = pair->a->remote_region(dst->descriptor());
    std::vector<std::thread> threads;
    std::atomic<uint64_t> ended{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        std::vector<TransferRef> sent;
        try {
          for (int i = 0; i < 3000; ++i) {
            sent.push_back(
                pair->a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 4096, .imm = 2}));
          }
        } catch (const EngineClosedError&) {
        }
        for (const TransferRef& transfer : sent) {
          const WaitResult result = transfer->wait(deadline_in(20), {});
          INFO("round ", round, ", result ", static_cast<int>(result), ", status ", status_name(transfer->status()));
          CHECK(result == WaitResult::kReady);
          ++ended;
        }
      });
    }
    const Ref<ImmCounter> counter = pair->b->imm_counter(4);
    std::thread waiter([&] { CHECK(counter->wait(1, deadline_in(20), {}) == WaitResult::kClosed); });
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
    (round % 2 == 0 ? pair->a : pair->b)->close(0);
    for (std::thread& thread : threads) thread.join();
    pair->b->close(0);
    waiter.join();
    CHECK(pair->a->stats().transfers_inflight == 0);
  }
}

TEST_CASE("a transfer is in flight all the time, whatever engines tell each other meanwhile") {
  Pair pair(1, 1);
  RegionRef src = pair.a->alloc(64, false);
  RegionRef dst = pair.b->alloc(64, false);
  RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  const auto notifier = Ref<Notifier>::adopt(new Notifier);
  const Ref<Watcher> watcher = pair.a->alloc_watcher(notifier.get(), 0);
  TransferRef waiting = pair.a->submit_write({.src = src.get(),
                                              .dst = remote.get(),
                                              .length_bytes = 8,
                                              .trigger = {.watcher = watcher.get(), .threshold = 1}});
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> looks{0}, misses{0};
  std::thread looker([&] {
    while (!stop.load()) {
      if (pair.a->core().users_inflight() != 1) ++misses;
      const EngineStats stats = pair.a->stats();
      if (stats.transfers_submitted != 1 || stats.transfers_inflight != 1) ++misses;
      ++looks;
    }
  });
  const Deadline deadline = deadline_in(20);
  for (int round = 0; (round < 10'000 || looks < 200'000) && now_ns() < deadline; ++round) {
    pair.a->core().run_as_holder([&] {
      for (int i = 0; i < 20; ++i) pair.a->core().send_service(*remote->peer(), encode(Ping{}), 0);
    });
  }
  stop.store(true);
  looker.join();
  CHECK(misses.load() == 0);
  watcher->add(1);
  require_done(waiting);
}

TEST_CASE("a region that closed while others submitted from it is not touched any more") {
  Pair pair;
  constexpr uint64_t kBytes = 4096;
  RegionRef dst = pair.b->alloc(kBytes, false);
  RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  std::mt19937 random(5);
  for (int round = 0; round < 100; ++round) {
    std::vector<std::byte> memory(kBytes);
    RegionRef src = pair.a->register_memory(memory.data(), kBytes, Access::kLocal);
    std::atomic<uint32_t> submitted{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        const uint64_t length = t == 0 ? 64 : kBytes;
        try {
          for (;;) {
            TransferRef sent = pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = length});
            submitted.fetch_add(1, std::memory_order_relaxed);
          }
        } catch (const UsageError&) {
        }
      });
    }
    while (submitted.load(std::memory_order_relaxed) < random() % 200) std::this_thread::yield();
    REQUIRE(src->close(deadline_in(20), {}) == WaitResult::kReady);
    std::memset(memory.data(), 1, kBytes);  // ours again: ThreadSanitizer sees who still reads
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_CASE("an engine that is dropped with a write under way finishes it, then ends") {
  constexpr uint64_t kBytes = 8 << 20;
  EngineRef b = open_engine("b");
  RegionRef dst = b->alloc(kBytes, true);
  for (int round = 0; round < 5; ++round) {
    EngineRef a = open_engine("a");
    RegionRef src = a->alloc(kBytes, true);
    RemoteRegionRef remote = a->remote_region(dst->descriptor());
    a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kBytes, .imm = 5});
    src = nullptr;
    remote = nullptr;
    a = nullptr;
    require_counted(*b, 5, 1);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // they end on threads of their own
  b->close(0);
}

TEST_CASE("an engine that is dropped while a write waits for its word begins it, then ends") {
  EngineRef b = open_engine("b");
  RegionRef dst = b->alloc(4096, false);
  const auto notifier = Ref<Notifier>::adopt(new Notifier);
  for (const bool by_kernel : {false, true}) {
    EngineRef a = open_engine("a");
    PeerRef seen_by_b = b->peer(a->address());
    REQUIRE(b->connect(*seen_by_b, deadline_in(20), {}) == WaitResult::kReady);
    RegionRef src = a->alloc(4096, false);
    RemoteRegionRef remote = a->remote_region(dst->descriptor());
    require_done(a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8}));
    Ref<Watcher> watcher = a->alloc_watcher(notifier.get(), 0);
    a->submit_write({.src = src.get(),
                     .dst = remote.get(),
                     .length_bytes = 8,
                     .imm = 5,
                     .trigger = {.watcher = watcher.get(), .threshold = 1}});
    std::atomic<uint64_t>* const word = by_kernel ? watcher->word() : nullptr;
    src = nullptr;
    remote = nullptr;
    a = nullptr;
    if (by_kernel) {
      watcher = nullptr;  // the write keeps the word
      word->store(1, std::memory_order_release);
    } else {
      watcher->add(1);
      watcher = nullptr;
    }
    require_counted(*b, 5, 1);
    const Deadline deadline = deadline_in(20);
    while (seen_by_b->state() != PeerState::kLost && now_ns() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(seen_by_b->state() == PeerState::kLost);
  }
  b->close(0);
}

TEST_CASE("an engine that is dropped while it sends heartbeats ends once") {
  EngineRef b = open_engine("b");
  for (int round = 0; round < 100; ++round) {
    EngineOptions options;
    options.name = "a";
    options.heartbeat_ns = 1000;
    EngineRef a = Engine::open(options);
    PeerRef peer = a->peer(b->address());
    REQUIRE(a->connect(*peer, deadline_in(20), {}) == WaitResult::kReady);
    peer = nullptr;
    a = nullptr;
  }
  b->close(0);
}

TEST_CASE("who forgets a peer twice leaves the one alone that has come in between") {
  Pair pair;
  RegionRef src = pair.a->alloc(4096, false);
  RegionRef dst = pair.b->alloc(4096, false);
  const PeerRef first = pair.a->peer(pair.b->address());
  require_done(pair.a->submit_write(
      {.src = src.get(), .dst = pair.a->remote_region(dst->descriptor()).get(), .length_bytes = 8}));
  pair.a->forget_peer(*first);
  const PeerRef second = pair.a->peer(pair.b->address());
  REQUIRE(second.get() != first.get());
  const RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  require_done(pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8}));
  const auto sent = [&] {
    uint64_t works = 0;
    for (const RailTrafficReport& rail : pair.a->traffic(1'000'000'000).rails) works += rail.counts.works;
    return works;
  };
  const uint64_t sent_before = sent();
  pair.a->forget_peer(*first);
  CHECK(pair.a->peer(pair.b->address()).get() == second.get());
  CHECK(sent() == sent_before);
  require_done(pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8}));
}

// Whose close() returns may free the memory: it must not return while the other one is about to refuse peers.
TEST_CASE("when two threads close a region at once, peers are refused when the first of them returns") {
  constexpr uint32_t kRounds = 30'000;
  EngineRef engine = open_engine("closes");
  std::array<std::byte, 64> memory{};
  RegionRef region;
  uint64_t id = 0;
  std::atomic<uint32_t> begun{0};
  std::atomic<uint32_t> ended{0};
  std::atomic<uint32_t> early{0};
  const auto close = [&] {
    if (region->close(deadline_in(20), {}) != WaitResult::kReady || region->is_open_as(id)) early.fetch_add(1);
  };
  std::thread other([&] {
    for (uint32_t round = 1; round <= kRounds; ++round) {
      while (begun.load() < round) cpu_relax();
      close();
      ended.store(round);
    }
  });
  for (uint32_t round = 1; round <= kRounds; ++round) {
    region = engine->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
    id = region->descriptor().region_id;
    begun.store(round);
    close();
    while (ended.load() < round) std::this_thread::yield();
  }
  other.join();
  CHECK(early.load() == 0);
  engine->close(0);
}

TEST_CASE("when the close() of a pool wakes somebody, another pool can be opened") {
  constexpr uint32_t kRounds = 3000;
  EngineRef engine = open_engine("receives");
  Ref<ReceivePool> pool = engine->submit_recvs(1, 64);
  for (uint32_t round = 0; round < kRounds; ++round) {
    std::thread closer([old = pool] { old->close(); });
    REQUIRE(pool->wait(deadline_in(20), {}) == WaitResult::kClosed);
    CHECK_NOTHROW(pool = engine->submit_recvs(1, 64));
    closer.join();
  }
  engine->close(0);
}

// Else nobody ever would close it, and who waits there waits for ever.
TEST_CASE("a pool that is opened while the engine closes is closed, too") {
  constexpr uint32_t kRounds = 200;
  constexpr size_t kThreads = 6;
  for (uint32_t round = 0; round < kRounds; ++round) {
    EngineRef engine = open_engine("receives");
    std::array<Ref<ReceivePool>, kThreads> last;
    std::vector<std::thread> threads;
    for (Ref<ReceivePool>& pool : last) {
      threads.emplace_back([&engine, &pool] {
        try {
          for (;;) {
            try {
              pool = engine->submit_recvs(1, 64);
              if (!engine->closed()) pool->close();
            } catch (const UsageError&) {  // another thread's is open
            }
          }
        } catch (const EngineClosedError&) {
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    engine->close(0);
    for (std::thread& thread : threads) thread.join();
    for (const Ref<ReceivePool>& pool : last) REQUIRE((!pool || pool->closed()));
  }
}

}  // namespace crossrail::test
