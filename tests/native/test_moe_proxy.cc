// Words between threads, and rows between proxies: for ThreadSanitizer and AddressSanitizer.
#include <doctest/doctest.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "moe/proxy_thread.h"
#include "moe/words.h"
#include "moe_rig.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::moe {

TEST_CASE("moe words: what was written before a word is seen by who waited for it") {
  const EngineRef engine = open_engine("a");
  Patience patience(engine->options().spin_ns);
  const RegionRef board = engine->alloc(4096, true);
  auto* words = reinterpret_cast<Word*>(board->base());
  int values[2] = {0, 0};  // plain: a race would be found
  constexpr uint32_t kRounds = 4000;
  const auto play = [&](uint32_t own) {
    const Awaited other{.word = &words[1 - own], .farewell = &words[2], .owner = nullptr};
    for (uint32_t round = 2; round <= kRounds; round += 2) {
      values[own] = static_cast<int>(round);
      REQUIRE(publish(words[own], round));
      const WordsOutcome outcome = wait_words(*engine, patience, {&other, 1}, {}, round, deadline_in(60), {});
      REQUIRE(outcome.result == WordsResult::kReady);
      if (values[1 - own] < static_cast<int>(round)) FAIL("a stale value");
      REQUIRE(publish(words[3 + own], round));  // seen: it may be written again
      const Awaited seen{.word = &words[4 - own], .farewell = &words[2], .owner = nullptr};
      REQUIRE(wait_words(*engine, patience, {&seen, 1}, {}, round, deadline_in(60), {}).result == WordsResult::kReady);
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  engine->close(0);
}

TEST_CASE("moe words: late, left and closed are told apart, and a round that is ahead will do") {
  const EngineRef engine = open_engine("a");
  Patience patience(engine->options().spin_ns);
  const RegionRef board = engine->alloc(4096, true);
  auto* words = reinterpret_cast<Word*>(board->base());
  const Awaited awaited{.word = &words[0], .farewell = &words[1], .owner = nullptr};
  const auto wait = [&](uint32_t round, double seconds) {
    return wait_words(*engine, patience, {&awaited, 1}, {}, round, deadline_in(seconds), {}).result;
  };
  CHECK(wait(2, 0.01) == WordsResult::kLate);
  CHECK(publish(words[0], 8));
  CHECK(wait(8, 60) == WordsResult::kReady);
  CHECK(wait(6, 60) == WordsResult::kReady);
  CHECK(publish(words[0], 0x80000000u));
  CHECK(publish(words[0], 0xfffffffeu));
  CHECK(wait(0xfffffffcu, 60) == WordsResult::kReady);
  CHECK(wait(2, 0.01) == WordsResult::kLate);  // numbers go round
  CHECK(publish(words[1], 2));
  CHECK(wait(2, 60) == WordsResult::kLeft);
  engine->close(0);
  CHECK(wait(2, 60) == WordsResult::kClosed);
}

TEST_CASE("moe words: of a word that is published and sealed at once all see the same end") {
  constexpr uint32_t kWords = 2000;
  constexpr uint32_t kSealers = 3;
  for (const uint32_t round : {1u, 2u, 0u, 0xffffffffu}) {
    std::vector<Word> words(kWords);
    for (Word& word : words) word.value.store(round - 2, std::memory_order_relaxed);
    std::vector<uint8_t> published(kWords);
    std::array<std::vector<uint8_t>, kSealers> absent;
    std::atomic<uint32_t> at_gate{0};
    const auto come = [&] {
      at_gate.fetch_add(1);
      while (at_gate.load() < kSealers + 1) std::this_thread::yield();
    };
    std::vector<std::thread> sealers;
    for (auto& one : absent) {
      one.resize(kWords);
      sealers.emplace_back([&] {
        come();
        for (uint32_t i = 0; i < kWords; ++i) one[i] = seal(words[kWords - 1 - i], round) ? 1 : 0;
      });
    }
    come();
    for (uint32_t i = 0; i < kWords; ++i) published[i] = publish(words[i], round) ? 1 : 0;
    for (std::thread& sealer : sealers) sealer.join();
    for (uint32_t i = 0; i < kWords; ++i) {
      for (const auto& one : absent) REQUIRE(one[kWords - 1 - i] + published[i] == 1);
      REQUIRE(has_come(words[i], round) == (published[i] == 1));
      REQUIRE(is_sealed(words[i], round) == (published[i] == 0));
      REQUIRE(has_come(words[i], round - 2));
      REQUIRE(publish(words[i], round + 2) == (published[i] == 1));
    }
  }
}

TEST_CASE("moe words: a wait goes on without an owner that is masked, and without one whose word another sealed") {
  const EngineRef engine = open_engine("a");
  Patience patience(engine->options().spin_ns);
  const RegionRef board = engine->alloc(4096, true);
  auto* words = reinterpret_cast<Word*>(board->base());
  std::vector<Awaited> awaited(3);
  for (size_t i = 0; i < 3; ++i) awaited[i] = {.word = &words[i], .farewell = &words[3], .owner = nullptr};
  std::vector<size_t> absent;
  REQUIRE(publish(words[0], 2));
  REQUIRE(seal(words[1], 2));
  awaited[2].is_masked = true;
  CHECK(wait_words(*engine, patience, awaited, {}, 2, deadline_in(60), {}, &absent).result == WordsResult::kReady);
  CHECK(absent == std::vector<size_t>{1, 2});
  CHECK(!publish(words[2], 2));
  absent.clear();
  CHECK(wait_words(*engine, patience, awaited, {}, 4, deadline_in(0.01), {}, &absent).result == WordsResult::kLate);
  CHECK(publish(words[0], 4));
  engine->close(0);
}

TEST_CASE("moe proxy: rows and results of two ranks, with remainders, and what is expected twice is taken once") {
  constexpr uint64_t kStride = 32;
  constexpr uint64_t kResult = 16;
  constexpr int32_t kTokens = 5;
  const Layout layout(
      {.world = 2, .experts = kExperts, .top_k = 1, .max_tokens = 8, .private_rows = 2, .node_of_rank = own_nodes(2)});
  const FarMemory memory = parts(2, 8, kStride, kResult);
  EngineRef engines[2] = {open_engine("a"), open_engine("b")};
  FarRegions<RegionRef> regions[2];
  std::unique_ptr<Proxy> proxies[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    regions[rank] = alloc(*engines[rank], memory, true);
    proxies[rank] = std::make_unique<Proxy>(engines[rank], layout, rank, memory, regions[rank]);
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const uint32_t other = 1 - rank;
    proxies[rank]->connect(other, remote(*engines[rank], regions[other]), proxies[other]->imms_for(rank));
  }
  // Rank 1 has a thread that posts for it; of a few microseconds, so that it also sleeps.
  auto thread = std::make_unique<ProxyThread>(*proxies[1], -1, 5'000);
  const auto post = [&](uint32_t rank, const auto& step) { rank == 0 ? step(*proxies[0]) : step(*thread); };
  const auto wait = [&](uint32_t rank, FarStep step, uint32_t round, Deadline deadline) {
    if (rank == 1) REQUIRE(thread->settle(deadline_in(60)));
    return proxies[rank]->wait(step, round, deadline, {}).result;
  };
  const auto play = [&](uint32_t rank) {
    Proxy& proxy = *proxies[rank];
    const uint32_t other = 1 - rank;
    for (uint32_t round = 1; round <= 50; ++round) {
      std::byte* base = regions[rank].rows->base() + round % 2 * memory.rows_parity_bytes;
      std::vector<int32_t> counts(kExperts);
      counts[layout.first_expert(other)] = kTokens;
      REQUIRE(proxy.wait_sent(round, deadline_in(60), {}).result == FarResult::kReady);
      post(rank, [&](auto& to) { to.send_routes(round, counts); });
      const auto mark = static_cast<int>(round * 2 + rank);
      std::memset(base + memory.rows_out, mark, kTokens * kStride);
      post(rank, [&](auto& to) { to.send_rows(round); });
      REQUIRE(wait(rank, FarStep::kRoutes, round, deadline_in(60)) == FarResult::kReady);
      std::vector<int32_t> table(2 * kExperts);
      std::copy(counts.begin(), counts.end(), table.begin() + rank * kExperts);
      std::ranges::copy(proxy.routes_of(round, other), table.begin() + other * kExperts);
      const Placement placement(layout, table);
      REQUIRE(placement.routes(other, rank) == kTokens);
      post(rank, [&](auto& to) { to.send_remainder(round, &placement); });
      REQUIRE(wait(rank, FarStep::kRows, round, deadline_in(60)) == FarResult::kReady);
      REQUIRE(wait(rank, FarStep::kRows, round, 0) == FarResult::kReady);
      const auto theirs = static_cast<std::byte>(round * 2 + other);
      for (const Move& move : placement.pull_far(rank)) {
        const std::byte* row = base + memory.rows_in + static_cast<uint64_t>(move.from) * kStride;
        REQUIRE(std::all_of(row, row + kStride, [&](std::byte b) { return b == theirs; }));
      }
      std::memset(base + memory.results_out, static_cast<int>(theirs) ^ 0xff, kTokens * kResult);
      post(rank, [&](auto& to) { to.send_results(round, &placement); });
      REQUIRE(wait(rank, FarStep::kResults, round, deadline_in(60)) == FarResult::kReady);
      const std::byte* result = base + memory.results_in;
      REQUIRE(std::all_of(result, result + kTokens * kResult,
                          [&](std::byte b) { return b == static_cast<std::byte>(mark ^ 0xff); }));
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  thread.reset();
  for (auto& proxy : proxies) proxy.reset();
  for (const EngineRef& engine : engines) engine->close(0);
}

TEST_CASE("moe proxy: a thread carries out what was ordered before it ends, and tells what failed") {
  const Layout layout(
      {.world = 2, .experts = kExperts, .top_k = 1, .max_tokens = 8, .private_rows = 2, .node_of_rank = own_nodes(2)});
  const FarMemory memory = parts(2, 8, 32, 16);
  TwoRanks ranks(layout, memory);
  const std::vector<int32_t> counts(kExperts);
  {
    ProxyThread thread(ranks.here, -1, 0);
    thread.send_routes(1, counts);
    thread.send_rows(1);
  }
  REQUIRE(ranks.there.wait(FarStep::kRoutes, 1, deadline_in(60), {}).result == FarResult::kReady);
  ranks.there.send_remainder(1, nullptr);
  REQUIRE(ranks.there.wait(FarStep::kRows, 1, deadline_in(60), {}).result == FarResult::kReady);

  ProxyThread thread(ranks.here, -1, 0);
  for (uint32_t i = 0; i < 1000; ++i) {  // it sleeps in between, or not
    thread.send_rows(1);
    if (i % 8 == 7) REQUIRE(thread.settle(deadline_in(60)));
  }
  ranks.engines[0]->close(deadline_in(10));
  thread.send_rows(1);
  thread.send_rows(1);
  CHECK_THROWS_AS(thread.settle(deadline_in(60)), EngineClosedError);
  CHECK(thread.settle(deadline_in(60)));
  ranks.engines[1]->close(0);
}

TEST_CASE("moe proxy: what is counted a little after a farewell is taken, and what is not is missed") {
  const Layout layout({.world = 2, .experts = kExperts, .node_of_rank = own_nodes(2)});
  const FarMemory memory = parts(2, 8, 32, 16);
  TwoRanks ranks(layout, memory);
  const auto wait = [&](FarStep step, double seconds) {
    return ranks.there.wait(step, 1, deadline_in(seconds), {}).result;
  };
  ranks.here.say_farewell({}, deadline_in(60));
  while (!ranks.there.has_come_from(FarStep::kFarewell, 0, 0)) std::this_thread::yield();
  CHECK(wait(FarStep::kRoutes, 0.001) == FarResult::kLate);  // one look at the end
  ranks.here.send_routes(1, std::vector<int32_t>(kExperts));
  CHECK(wait(FarStep::kRoutes, 60) == FarResult::kReady);
  CHECK(wait(FarStep::kResults, 60) == FarResult::kLeft);
  for (const EngineRef& engine : ranks.engines) engine->close(0);
}

TEST_CASE("moe proxy: who refuses writes has left, and his farewell, which says whom he lost, is waited for") {
  const Layout layout({.world = 2, .experts = kExperts, .node_of_rank = own_nodes(2)});
  const FarMemory memory = parts(2, 8, 32, 16);
  TwoRanks ranks(layout, memory);
  ranks.regions[0].rows->close(deadline_in(10), {});
  ranks.there.send_routes(1, std::vector<int32_t>(kExperts));
  ranks.there.send_rows(1);
  CHECK(ranks.there.wait_sent(1, deadline_in(60), {}).result ==
        FarResult::kReady);  // refused, and yet no reason to give up
  CHECK(!ranks.there.why_left(0).number);
  CHECK(ranks.there.why_left(0).words.empty());
  const std::string words(300, 'w');
  ranks.here.say_farewell({.number = 7, .words = words}, deadline_in(60));
  const FarOutcome told = ranks.there.wait(FarStep::kRoutes, 1, deadline_in(60), {});
  CHECK(told.result == FarResult::kLeft);
  CHECK(ranks.there.why_left(0).number == 7);
  CHECK(ranks.there.why_left(0).words == words.substr(0, kFarewellWords));
  for (const EngineRef& engine : ranks.engines) engine->close(0);
}

TEST_CASE("moe proxy: a write that failed at a rank that had all of its last round is none of ours to mend") {
  const Layout layout({.world = 2, .experts = kExperts, .node_of_rank = own_nodes(2)});
  const FarMemory memory = parts(2, 8, 32, 16);
  for (const bool is_last : {true, false}) {
    TwoRanks ranks(layout, memory);
    ranks.there.send_routes(1, std::vector<int32_t>(kExperts));
    while (!ranks.here.has_come_from(FarStep::kRoutes, 1, 1)) std::this_thread::yield();
    ranks.here.send_results(1, nullptr);
    if (is_last) ranks.here.say_farewell({}, deadline_in(60));
    while (!ranks.there.has_come_from(FarStep::kResults, 1, 0)) std::this_thread::yield();
    ranks.engines[0]->close(deadline_in(10));
    const PeerRef gone = ranks.engines[1]->peer(ranks.regions[0].rows->descriptor().owner);
    while (gone->state() != PeerState::kLost) std::this_thread::yield();
    ranks.there.send_results(1, nullptr);  // as if its engine had been closed before ours heard that this had come
    while (ranks.there.wait_sent(1, deadline_in(60), {}).detail.empty()) std::this_thread::yield();
    const FarOutcome told = ranks.there.wait(FarStep::kResults, 1, deadline_in(60), {});
    CHECK(told.result == (is_last ? FarResult::kReady : FarResult::kPeerLost));
    ranks.engines[1]->close(0);
  }
}

TEST_CASE("moe proxy: a thread that cannot run where it is to is refused, with where it may") {
  const Layout layout({.world = 2, .experts = kExperts, .node_of_rank = own_nodes(2)});
  const FarMemory memory = parts(2, 8, 32, 16);
  const EngineRef engine = open_engine("a");
  Proxy proxy(engine, layout, 0, memory, alloc(*engine, memory, false));
  CHECK_THROWS_WITH_AS(ProxyThread(proxy, 100'000, 0), doctest::Contains("proxy_cpu is 100000"), UsageError);
  CHECK_THROWS_WITH_AS(ProxyThread(proxy, -2, 0), doctest::Contains("it may on "), UsageError);
  ProxyThread pinned(proxy, sched_getcpu(), 0);
  engine->close(0);
}

}  // namespace crossrail::moe
