// Words between threads, and rows between proxies: for ThreadSanitizer and AddressSanitizer.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "moe/words.h"
#include "moe_rig.h"
#include "util/clock.h"

namespace crossrail::moe {

TEST_CASE("moe words: what was written before a word is seen by who waited for it") {
  const EngineRef engine = open_engine("a");
  const RegionRef board = engine->alloc(4096, true);
  auto* words = reinterpret_cast<Word*>(board->base());
  int values[2] = {0, 0};  // plain: a race would be found
  constexpr uint32_t kRounds = 2000;
  const auto play = [&](uint32_t own) {
    const Awaited other{.word = &words[1 - own], .farewell = &words[2], .owner = nullptr};
    for (uint32_t round = 1; round <= kRounds; ++round) {
      values[own] = static_cast<int>(round);
      publish(words[own], round);
      const WordsOutcome outcome = wait_words(*engine, {&other, 1}, {}, round, deadline_in(60), {});
      REQUIRE(outcome.result == WordsResult::kReady);
      if (values[1 - own] < static_cast<int>(round)) FAIL("a stale value");
      publish(words[3 + own], round);  // seen: it may be written again
      const Awaited seen{.word = &words[4 - own], .farewell = &words[2], .owner = nullptr};
      REQUIRE(wait_words(*engine, {&seen, 1}, {}, round, deadline_in(60), {}).result == WordsResult::kReady);
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  engine->close(0);
}

TEST_CASE("moe words: late, left and closed are told apart, and a round that is ahead will do") {
  const EngineRef engine = open_engine("a");
  const RegionRef board = engine->alloc(4096, true);
  auto* words = reinterpret_cast<Word*>(board->base());
  const Awaited awaited{.word = &words[0], .farewell = &words[1], .owner = nullptr};
  const auto wait = [&](uint32_t round, double seconds) {
    return wait_words(*engine, {&awaited, 1}, {}, round, deadline_in(seconds), {}).result;
  };
  CHECK(wait(1, 0.01) == WordsResult::kLate);
  publish(words[0], 7);
  CHECK(wait(7, 60) == WordsResult::kReady);
  CHECK(wait(5, 60) == WordsResult::kReady);
  publish(words[0], 0x80000000u);
  publish(words[0], 0xffffffffu);
  CHECK(wait(0xfffffffeu, 60) == WordsResult::kReady);
  CHECK(wait(1, 0.01) == WordsResult::kLate);  // numbers go round
  publish(words[1], 1);
  CHECK(wait(1, 60) == WordsResult::kLeft);
  engine->close(0);
  CHECK(wait(1, 60) == WordsResult::kClosed);
}

TEST_CASE("moe proxy: rows and results of two ranks, with remainders, and what is expected twice is taken once") {
  constexpr uint64_t kStride = 32;
  constexpr uint64_t kResult = 16;
  constexpr int32_t kTokens = 5;
  const Layout layout(
      {.world = 2, .experts = kExperts, .top_k = 1, .max_tokens = 8, .private_rows = 2, .node_of_rank = own_nodes(2)});
  const FarMemory memory = parts(2, 8, kStride, kResult);
  EngineRef engines[2] = {open_engine("a"), open_engine("b")};
  RegionRef regions[2];
  std::unique_ptr<Proxy> proxies[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    regions[rank] = engines[rank]->alloc(2 * memory.parity_bytes, true);
    proxies[rank] = std::make_unique<Proxy>(engines[rank], layout, rank, memory, regions[rank]);
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const uint32_t other = 1 - rank;
    proxies[rank]->connect(other, engines[rank]->remote_region(regions[other]->descriptor()),
                           proxies[other]->imms_for(rank));
  }
  const auto play = [&](uint32_t rank) {
    Proxy& proxy = *proxies[rank];
    const uint32_t other = 1 - rank;
    for (uint32_t round = 1; round <= 50; ++round) {
      const uint64_t half = round % 2 * memory.parity_bytes;
      std::byte* base = regions[rank]->base() + half;
      std::vector<int32_t> counts(kExperts);
      counts[layout.first_expert(other)] = kTokens;
      REQUIRE(proxy.wait_sent(round, deadline_in(60), {}).result == FarResult::kReady);
      proxy.send_routes(round, counts);
      const auto mark = static_cast<int>(round * 2 + rank);
      std::memset(base + memory.rows_out, mark, kTokens * kStride);
      proxy.send_rows(round);
      REQUIRE(proxy.wait(FarStep::kRoutes, round, deadline_in(60), {}).result == FarResult::kReady);
      std::vector<int32_t> table(2 * kExperts);
      std::copy(counts.begin(), counts.end(), table.begin() + rank * kExperts);
      std::ranges::copy(proxy.routes_of(round, other), table.begin() + other * kExperts);
      const Placement placement(layout, table);
      REQUIRE(placement.routes(other, rank) == kTokens);
      proxy.send_remainder(round, &placement);
      REQUIRE(proxy.wait(FarStep::kRows, round, deadline_in(60), {}).result == FarResult::kReady);
      REQUIRE(proxy.wait(FarStep::kRows, round, 0, {}).result == FarResult::kReady);
      const auto theirs = static_cast<std::byte>(round * 2 + other);
      for (const Move& move : placement.pull_far(rank)) {
        const std::byte* row = base + memory.rows_in + static_cast<uint64_t>(move.from) * kStride;
        REQUIRE(std::all_of(row, row + kStride, [&](std::byte b) { return b == theirs; }));
      }
      std::memset(base + memory.results_out, static_cast<int>(theirs) ^ 0xff, kTokens * kResult);
      proxy.send_results(round, &placement);
      REQUIRE(proxy.wait(FarStep::kResults, round, deadline_in(60), {}).result == FarResult::kReady);
      const std::byte* result = base + memory.results_in;
      REQUIRE(std::all_of(result, result + kTokens * kResult,
                          [&](std::byte b) { return b == static_cast<std::byte>(mark ^ 0xff); }));
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  for (auto& proxy : proxies) proxy.reset();
  for (const EngineRef& engine : engines) engine->close(0);
}

}  // namespace crossrail::moe
