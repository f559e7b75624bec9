// Threads that wait without spinning: who sleeps in front of the worker, who on a futex, and what wakes them.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "util/clock.h"

namespace crossrail {

namespace {

EngineRef open(const std::string& name, TransportKind transport, Polling polling) {
  EngineOptions options;
  options.name = name;
  options.transports = {transport};
  if (transport == TransportKind::kTcp) options.rails = {"127.0.0.1"};
  options.polling = polling;
  options.spin_ns = 0;
  return Engine::open(options);
}

struct Side {
  EngineRef engine;
  RegionRef memory = engine->alloc(4096, false);
};

// Half of a ping-pong on a number of its own: answers each write of the other's, and begins if told to.
void play(Side& own, Side& other, uint32_t imm, int rounds, bool begins) {
  RemoteRegionRef target = own.engine->remote_region(other.memory->descriptor());
  const Ref<ImmCounter> counter = own.engine->imm_counter(imm);
  std::vector<TransferRef> answers;
  for (int round = 0; round < rounds; ++round) {
    if (!begins || round > 0) REQUIRE(counter->wait(1, deadline_in(60), {}) == WaitResult::kReady);
    answers.push_back(own.engine->submit_write({.src = own.memory.get(),
                                                .src_offset = 128 + imm * 8,
                                                .dst = target.get(),
                                                .dst_offset = imm * 8,
                                                .length_bytes = 8,
                                                .imm = imm}));
    // Some wait for their answer to be there, which another's wait may have seen to.
    if (round % 3 == 0) REQUIRE(answers.back()->wait(deadline_in(60), {}) == WaitResult::kReady);
  }
  for (const TransferRef& answer : answers) {
    REQUIRE(answer->wait(deadline_in(60), {}) == WaitResult::kReady);
    CHECK(answer->status() == Status::kDone);
  }
  if (begins) REQUIRE(counter->wait(1, deadline_in(60), {}) == WaitResult::kReady);
}

void play_together(TransportKind transport, Polling polling) {
  constexpr int kPlayers = 3;
  constexpr int kRounds = 400;
  Side a{open("a", transport, polling)}, b{open("b", transport, polling)};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (uint32_t imm = 1; imm <= kPlayers; ++imm) {
    threads.emplace_back([&, imm] { play(a, b, imm, kRounds, true); });
    threads.emplace_back([&, imm] { play(b, a, imm, kRounds, false); });
  }
  // Comes and goes in front, for what never comes.
  std::thread visitor([&] {
    const Ref<ImmCounter> counter = a.engine->imm_counter(99);
    for (int i = 0; !over.load(); ++i)
      CHECK(counter->wait(1, now_ns() + 10'000 * (i % 20), {}) == WaitResult::kTimeout);
  });
  for (std::thread& thread : threads) thread.join();
  over.store(true);
  visitor.join();
  for (uint32_t imm = 1; imm <= kPlayers; ++imm) {
    CHECK(a.engine->imm_counter(imm)->poll() == 0);
    CHECK(b.engine->imm_counter(imm)->poll() == 0);
  }
  a.engine->close(deadline_in(10));
  b.engine->close(deadline_in(10));
}

// Its worker has seen nothing for so long that it sleeps until it is rung.
void wait_until_asleep_for_good(const EngineRef& engine) {
  const Deadline deadline = deadline_in(60);
  uint64_t sleeps = 0;
  for (int quiet = 0; quiet < 4; ++quiet) {
    REQUIRE(now_ns() < deadline);
    if (engine->stats().worker_sleeps != std::exchange(sleeps, engine->stats().worker_sleeps)) quiet = 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(25));  // longer than it sleeps before
  }
}

}  // namespace

TEST_CASE("waits: several threads of an engine wake each other and are woken, over shm") {
  play_together(TransportKind::kShm, Polling::kAdaptive);
}

TEST_CASE("waits: several threads of an engine wake each other and are woken, over tcp") {
  play_together(TransportKind::kTcp, Polling::kAdaptive);
}

TEST_CASE("waits: several threads of an engine that has no worker") {
  play_together(TransportKind::kShm, Polling::kManual);
}

TEST_CASE("waits: several threads beside a worker that spins") { play_together(TransportKind::kTcp, Polling::kSpin); }

TEST_CASE("waits: what another thread brought about is called to who waits in front") {
  Side side{open("a", TransportKind::kShm, Polling::kAdaptive)};
  constexpr int kTimes = 40;
  int64_t fastest_ns = kNoDeadline;  // who is not called looks by himself, every 50 ms
  for (int i = 0; i < kTimes; ++i) {
    const Ref<ImmCounter> counter = side.engine->alloc_imm();
    std::atomic<bool> waiting{false};
    std::thread waiter([&] {
      waiting.store(true);
      CHECK(counter->wait(1, deadline_in(60), {}) == WaitResult::kClosed);
    });
    while (!waiting.load()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int64_t begin = now_ns();
    side.engine->release_imm(counter->imm(), true);
    waiter.join();
    fastest_ns = std::min(fastest_ns, now_ns() - begin);
  }
  CHECK(fastest_ns < 20'000'000);
}

TEST_CASE("waits: whoever waits in front hears of the engine's end, and of a signal") {
  for (const TransportKind transport : {TransportKind::kShm, TransportKind::kTcp}) {
    Side side{open("a", transport, Polling::kAdaptive)};
    const Ref<ImmCounter> counter = side.engine->imm_counter(1);
    std::vector<std::thread> threads;
    std::atomic<int> waiting{0};
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        ++waiting;
        CHECK(counter->wait(1, deadline_in(60), {}) == WaitResult::kClosed);
      });
    }
    while (waiting.load() < 3) std::this_thread::yield();
    std::atomic<int> asked{0};
    CHECK(counter->wait(1, deadline_in(60), [&] { return ++asked == 2; }) == WaitResult::kInterrupted);
    CHECK(asked.load() == 2);
    side.engine->close(0);
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_CASE("waits: seconds that no deadline can tell are no deadline") {
  for (const double seconds : {-1.0, 1e10, std::numeric_limits<double>::infinity(), std::nan("")})
    CHECK(deadline_in(seconds) == kNoDeadline);
  CHECK(deadline_in(1e9) < kNoDeadline);
}

TEST_CASE("waits: the clock and signals are looked at while there always is more to move") {
  constexpr uint64_t kBytes = uint64_t{64} << 20;
  const EngineRef engine = open("a", TransportKind::kShm, Polling::kManual);  // nobody moves what it does not
  const EngineRef other = open("b", TransportKind::kShm, Polling::kAdaptive);
  const RegionRef src = engine->alloc(kBytes, false), dst = other->alloc(kBytes, false);
  const RemoteRegionRef target = engine->remote_region(dst->descriptor());
  REQUIRE(engine->connect(*target->peer(), deadline_in(60), {}) == WaitResult::kReady);
  std::vector<TransferRef> writes;
  for (int i = 0; i < 100; ++i)
    writes.push_back(engine->submit_write({.src = src.get(), .dst = target.get(), .length_bytes = kBytes}));
  const Ref<ImmCounter> counter = engine->imm_counter(1);

  CHECK(counter->wait(1, 0, {}) == WaitResult::kTimeout);
  CHECK(writes.front()->status() == Status::kPending);
  CHECK(counter->wait(1, deadline_in(0.01), {}) == WaitResult::kTimeout);
  CHECK(writes.back()->status() == Status::kPending);
  CHECK(counter->wait(1, deadline_in(60), [] { return true; }) == WaitResult::kInterrupted);
  CHECK(writes.back()->status() == Status::kPending);
  // Without time something is moved all the same.
  const Deadline deadline = deadline_in(60);
  while (writes.front()->wait(0, {}) != WaitResult::kReady) REQUIRE(now_ns() < deadline);
  engine->close(0);
}

// The arrival that progress() takes must not have rung: that is a matter of luck, so each of many has a try.
TEST_CASE("progress: a worker hears of what comes after the last call, also if that call moved something") {
  constexpr size_t kTries = 16;
  Side writer{open("writer", TransportKind::kShm, Polling::kAdaptive)};
  std::vector<Side> sides;
  std::vector<RemoteRegionRef> targets;
  for (size_t i = 0; i < kTries; ++i) {
    const Side& side = sides.emplace_back(Side{open("b" + std::to_string(i), TransportKind::kShm, Polling::kAdaptive)});
    targets.push_back(writer.engine->remote_region(side.memory->descriptor()));
    REQUIRE(writer.engine->connect(*targets.back()->peer(), deadline_in(60), {}) == WaitResult::kReady);
  }
  const auto write = [&](size_t i) {
    writer.engine->submit_write({.src = writer.memory.get(), .dst = targets[i].get(), .length_bytes = 8, .imm = 1});
  };
  for (size_t i = 0; i < kTries; ++i) {
    const EngineRef& engine = sides[i].engine;
    const Ref<ImmCounter> counter = engine->imm_counter(1);
    wait_until_asleep_for_good(engine);
    std::atomic<bool> driving{false};
    std::thread user([&] {
      while (counter->poll() == 0) {
        engine->progress();
        driving.store(true);
      }
    });
    while (!driving.load()) std::this_thread::yield();
    write(i);
    user.join();
    write(i);
    const Deadline deadline = deadline_in(5);
    while (counter->poll() < 2 && now_ns() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(counter->poll() == 2);
  }
}

}  // namespace crossrail
