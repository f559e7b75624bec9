// Rounds whose steps are kernels on a stream, which the test plays, without a GPU: moe/stream_proxy.h.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "device/round_words.h"
#include "fake_cuda.h"
#include "fake_gdrcopy.h"
#include "moe/stream_proxy.h"
#include "moe_rig.h"
#include "util/clock.h"

namespace crossrail::moe {
namespace {

constexpr uint32_t kTokens = 6;
constexpr uint32_t kTopK = 2;
constexpr uint64_t kRowBytes = 64;
constexpr int64_t kDeadlineNs = 20'000'000'000;

LayoutShape shape(uint32_t private_rows) {
  return {.world = 2,
          .experts = kExperts,
          .top_k = kTopK,
          .max_tokens = kTokens,
          .private_rows = private_rows,
          .rows_per_expert = 2 * kTokens,
          .node_of_rank = own_nodes(2)};
}

StreamBoard board_parts() {
  StreamBoard parts{};
  uint64_t end = kStreamWords * sizeof(device::RoundWords);
  const uint64_t begin = end;
  const auto place = [&end](uint64_t bytes) { return std::exchange(end, end + (bytes + 63) / 64 * 64); };
  parts.numbers = place(8);
  parts.routes = place(4 * kTokens * kTopK);
  parts.expert_rows = place(4 * kExperts);
  parts.expert_offsets = place(4 * (kExperts + 1));
  parts.moves = place(8 * 2 * kTokens * kTopK);
  parts.returns = place(sizeof(Return) * 2 * kTokens * kTopK);
  parts.parity_bytes = end - begin;
  return parts;
}

struct alignas(4096) Board {
  std::byte bytes[16384]{};
};

// device::Signals of one other rank: addresses for even rounds and for odd ones; 0: none.
using Table = std::array<uint64_t, 2>;

// One rank: its stream is the thread that calls.
struct StreamRank {
  StreamRank(TwoRanks& ranks, const Layout& layout, const FarMemory& of, uint32_t number, int64_t timeout_ns,
             int32_t rows_max = 2 * kTokens, int32_t gpu = -1)
      : memory(of),
        rank(number),
        rows(ranks.regions[number].rows->base()),
        private_rows(layout.shape().private_rows),
        proxy(ranks.engines[number], number == 0 ? ranks.here : ranks.there, layout, number, board.bytes, parts,
              {.timeout_ns = timeout_ns,
               .gpu = gpu,
               .rows_limits = std::vector<int64_t>(layout.shape().world, rows_max),
               .routes_limits = std::vector<int32_t>(layout.shape().world, kTokens * kTopK)}) {}

  template <typename T>
  T* at(uint64_t part) {
    return reinterpret_cast<T*>(board.bytes + part + number % 2 * parts.parity_bytes);
  }
  std::byte* row_at(std::byte* base, uint64_t part, uint64_t index) const {
    return base + part + number % 2 * memory.rows_parity_bytes + index * kRowBytes;
  }
  std::byte* row(uint64_t part, uint64_t index) const { return row_at(rows, part, index); }
  uint64_t address(uint64_t& of) { return reinterpret_cast<uint64_t>(&of); }
  void open() {
    device::open_round({}, address(rounds), address(number), proxy.told(StreamWord::kFree),
                       proxy.words(StreamWord::kAsked));
  }
  void publish(StreamWord word, const Table& to = {}) {
    device::publish_round({}, address(number), proxy.words(word), signals_of(to));
  }
  void await(StreamWord word, const Table& from = {}, bool needs_words = true) {
    device::await_round({}, address(number), proxy.words(word), signals_of(from), needs_words);
  }
  static device::Signals signals_of(const Table& table) {
    return {reinterpret_cast<uint64_t>(table.data()), table[0] == 0 ? 0u : 1u};
  }

  // Token t goes to expert t of our own and of the other rank's, with a byte that tells rank, token and round.
  void dispatch_send() {
    open();
    int32_t* const routes = at<int32_t>(parts.routes);
    for (uint32_t token = 0; token < kTokens; ++token) {
      routes[token * kTopK] = static_cast<int32_t>(token);
      routes[token * kTopK + 1] = static_cast<int32_t>(kExperts / 2 + token);
    }
    publish(StreamWord::kRoutes);
    for (uint32_t token = 0; token < kTokens; ++token) {
      const bool is_direct = reached != nullptr && token < private_rows;
      std::byte* const to = is_direct ? row_at(reached, memory.rows_in, token) : row(memory.rows_out, token);
      std::memset(to, byte_of(rank, token), kRowBytes);
    }
    publish(StreamWord::kPacked, rows_to);
  }
  // Rows of the other rank that the moves name, each where it should be.
  void dispatch_recv() {
    await(StreamWord::kRows, rows_from);
    const int32_t* const numbers = at<int32_t>(parts.numbers);
    REQUIRE(numbers[0] == 2 * kTokens);
    const Move* const moves = at<Move>(parts.moves);
    for (int32_t i = 0; i < numbers[0]; ++i) {
      const auto token = static_cast<uint32_t>(moves[i].to) / (2 * kTokens);
      if (moves[i].from < 0) {
        CHECK(static_cast<uint32_t>(-1 - moves[i].from) == token);
        continue;
      }
      const std::byte* const taken = row(memory.rows_in, static_cast<uint64_t>(moves[i].from));
      CHECK(taken[kRowBytes - 1] == static_cast<std::byte>(byte_of(1 - rank, token)));
    }
    CHECK(at<int32_t>(parts.expert_rows)[0] == 2);
    CHECK(at<int32_t>(parts.expert_offsets)[1] == 2 * kTokens);
  }
  void combine_send() {
    const int32_t* const numbers = at<int32_t>(parts.numbers);
    REQUIRE(numbers[1] == 2 * kTokens);
    const Return* const returns = at<Return>(parts.returns);
    for (uint32_t i = 0; i < 2 * kTokens; ++i) {
      const Return& each = returns[i];
      const auto expert = static_cast<uint32_t>(each.from) / (2 * kTokens);
      if (i >= kTokens) {  // for ourselves
        CHECK(each.target == static_cast<int32_t>(rank));
        CHECK(each.to == static_cast<int32_t>(expert));
        continue;
      }
      CHECK(each.target == static_cast<int32_t>(reached == nullptr ? 2 : 1 - rank));
      std::byte* const to = reached == nullptr ? row(memory.results_out, static_cast<uint64_t>(each.to))
                                               : row_at(reached, memory.results_in, static_cast<uint64_t>(each.to));
      std::memset(to, byte_of(rank, expert), kRowBytes);
    }
    publish(StreamWord::kReturned, results_to);
  }
  void combine_recv() {
    await(StreamWord::kResults, results_from, results_from[0] == 0);
    const uint64_t first = rank == 0 ? kTokens : 0;  // of our routes to the other rank
    for (uint32_t i = 0; i < kTokens; ++i)
      CHECK(*row(memory.results_in, first + i) == static_cast<std::byte>(byte_of(1 - rank, i)));
    publish(StreamWord::kEnded);
  }
  int byte_of(uint32_t source, uint32_t token) const {
    return static_cast<int>((source * 64 + token * 8 + number % 8) & 255);
  }

  const StreamBoard parts = board_parts();
  const FarMemory memory;
  const uint32_t rank;
  std::byte* const rows;
  std::byte* reached = nullptr;  // rows of the other rank, once we write there
  const uint32_t private_rows;
  // Signals that we write, in the other rank's memory, and that it writes, in ours.
  Table rows_to{}, results_to{}, rows_from{}, results_from{};
  std::array<uint64_t, 4> signals{};
  Board board;
  uint64_t rounds = 0;
  uint64_t number = 0;
  StreamProxy proxy;
};

// Who writes rows to the other by itself.
enum class Reach : uint8_t { kNone, kOneWay, kBoth };
void begin(Reach reach, TwoRanks& ranks, StreamRank& here, StreamRank& there) {
  const auto connect = [&](Proxy& proxy, StreamRank& from, Proxy& to_proxy, StreamRank& to) {
    proxy.reach(to.rank);
    to_proxy.hear(from.rank);
    from.reached = ranks.regions[to.rank].rows->base();
    const auto signal = [&to](size_t index) { return reinterpret_cast<uint64_t>(&to.signals[index]); };
    from.rows_to = to.rows_from = {signal(0), signal(1)};
    from.results_to = to.results_from = {signal(2), signal(3)};
  };
  if (reach != Reach::kNone) connect(ranks.here, here, ranks.there, there);
  if (reach == Reach::kBoth) connect(ranks.there, there, ranks.here, here);
}

FarMemory rows_memory() { return parts(2, 4 * kTokens * kTopK, kRowBytes, kRowBytes); }

}  // namespace

TEST_CASE("moe stream: rounds of two ranks, whose rows fit their slots or do not, who write to each other or do not") {
  for (const auto& [private_rows, reached] :
       {std::pair{2u, Reach::kNone}, std::pair{kTokens, Reach::kNone}, std::pair{2u, Reach::kOneWay},
        std::pair{2u, Reach::kBoth}, std::pair{kTokens, Reach::kBoth}}) {
    const Layout layout(shape(private_rows));
    const FarMemory memory = rows_memory();
    TwoRanks ranks(layout, memory);
    {
      StreamRank here(ranks, layout, memory, 0, kDeadlineNs);
      StreamRank there(ranks, layout, memory, 1, kDeadlineNs);
      begin(reached, ranks, here, there);
      const auto run = [](StreamRank& rank) {
        for (int round = 0; round < 40; ++round) {
          rank.dispatch_send();
          rank.dispatch_recv();
          rank.combine_send();
          rank.combine_recv();
        }
      };
      std::thread other([&] { run(there); });
      run(here);
      other.join();
      CHECK_FALSE(here.proxy.failure());
      CHECK_FALSE(there.proxy.failure());
    }
    for (const EngineRef& engine : ranks.engines) engine->close();
  }
}

TEST_CASE("moe stream: what kernels wait for is in the GPU's memory where there is GDRCopy, and let go there too") {
  const test::FakeCuda cuda;
  const test::FakeGdrcopy gdrcopy;
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  TwoRanks ranks(layout, memory);
  {
    StreamRank here(ranks, layout, memory, 0, kDeadlineNs, 2 * kTokens, 0);
    StreamRank there(ranks, layout, memory, 1, kDeadlineNs, 2 * kTokens, 1);
    REQUIRE(here.proxy.tells_in_gpu());
    CHECK(here.proxy.why_pinned().empty());
    const auto run = [](StreamRank& rank) {
      for (int round = 0; round < 10; ++round) {
        rank.dispatch_send();
        rank.dispatch_recv();
        rank.combine_send();
        rank.combine_recv();
      }
    };
    std::thread other([&] { run(there); });
    run(here);
    other.join();
    for (const StreamWord word : {StreamWord::kFree, StreamWord::kRows, StreamWord::kResults}) {
      const device::ToldWords told = here.proxy.told(word);
      CHECK(cuda.kernels.gpu_memory(told.gpu_address) == reinterpret_cast<const std::byte*>(&told.words));
      const auto* const in_board = reinterpret_cast<const device::RoundWords*>(here.board.bytes);
      CHECK((&told.words < in_board || &told.words >= in_board + kStreamWords));
    }
    here.proxy.stop();
    here.number = 11;
    here.await(StreamWord::kRows);
    CHECK(here.number == device::kNoRound);
    CHECK(cuda.allocated() == 2);
    here.proxy.close();
    here.proxy.close();
    CHECK(cuda.allocated() == 1);
    here.number = 12;
    here.await(StreamWord::kResults);  // as before, by the board
    CHECK(here.number == device::kNoRound);
  }
  for (const EngineRef& engine : ranks.engines) engine->close();
}

TEST_CASE("moe stream: where GDRCopy refuses, words are pinned, and it is said why") {
  const test::FakeCuda cuda;
  test::FakeGdrcopy gdrcopy;
  gdrcopy.pin_error = EPERM;
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  TwoRanks ranks(layout, memory);
  {
    StreamRank here(ranks, layout, memory, 0, kDeadlineNs, 2 * kTokens, 0);
    CHECK_FALSE(here.proxy.tells_in_gpu());
    CHECK(here.proxy.why_pinned().find("GDRCopy cannot pin memory of GPU 0") != std::string::npos);
    CHECK(here.proxy.told(StreamWord::kRows).gpu_address == 0);
  }
  for (const EngineRef& engine : ranks.engines) engine->close();
}

TEST_CASE("moe stream: who waits for a rank that does not come is let go, and told") {
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  TwoRanks ranks(layout, memory);
  {
    StreamRank here(ranks, layout, memory, 0, 50'000'000);
    here.dispatch_send();
    here.await(StreamWord::kRows);
    CHECK(here.number == device::kNoRound);
    std::optional<StreamFailure> failure = here.proxy.failure();
    REQUIRE(failure);
    CHECK(failure->outcome.result == FarResult::kLate);
    CHECK(failure->outcome.rank == 1);
    CHECK(failure->step == FarStep::kRoutes);
    CHECK(failure->round == 1);
    here.open();  // does not wait any more
    here.await(StreamWord::kResults);
  }
  for (const EngineRef& engine : ranks.engines) engine->close();
}

TEST_CASE("moe stream: a GPU that begins a round without having ended the last of its parity is let go, and told") {
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  TwoRanks ranks(layout, memory);
  {
    StreamRank here(ranks, layout, memory, 0, kDeadlineNs);
    StreamRank there(ranks, layout, memory, 1, kDeadlineNs);
    for (StreamRank* rank : {&here, &there}) {
      rank->dispatch_send();
      rank->dispatch_send();
    }
    here.await(StreamWord::kRows);  // of both rounds: the other rank is late with nothing
    here.proxy.set_timeout(50'000'000);
    here.open();  // the third
    std::optional<StreamFailure> failure = here.proxy.failure();
    REQUIRE(failure);
    CHECK(failure->outcome.result == FarResult::kLate);
    CHECK(failure->outcome.rank == 0);
    CHECK(failure->step == FarStep::kResults);
    CHECK(failure->round == 1);
  }
  for (const EngineRef& engine : ranks.engines) engine->close();
}

TEST_CASE("moe stream: a GPU that never tells the routes of a round that it began is let go, and told") {
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  TwoRanks ranks(layout, memory);
  {
    StreamRank here(ranks, layout, memory, 0, kDeadlineNs);
    here.open();
    here.proxy.set_timeout(50'000'000);
    here.dispatch_send();
    here.await(StreamWord::kRows);
    CHECK(here.number == device::kNoRound);
    std::optional<StreamFailure> failure = here.proxy.failure();
    REQUIRE(failure);
    CHECK(failure->outcome.result == FarResult::kLate);
    CHECK(failure->outcome.rank == 0);
    CHECK(failure->step == FarStep::kRoutes);
    CHECK(failure->round == 1);
  }
  for (const EngineRef& engine : ranks.engines) engine->close();
}

TEST_CASE("moe stream: of a round with too many rows others get no rows and no results, and need not wait for them") {
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  for (const bool is_packed : {false, true}) {
    TwoRanks ranks(layout, memory);
    {
      StreamRank here(ranks, layout, memory, 0, kDeadlineNs, 1);
      // The other rank's steps are calls.
      if (is_packed) {
        here.dispatch_send();
      } else {
        here.open();
        here.at<int32_t>(here.parts.routes)[0] = here.at<int32_t>(here.parts.routes)[2] = 0;  // two rows of one expert
        here.publish(StreamWord::kRoutes);
      }
      std::vector<int32_t> ours(kExperts, 0);
      ours[0] = 1;
      ranks.there.send_routes(1, ours);
      ranks.there.send_rows(1);
      for (const FarStep step : {FarStep::kRoutes, FarStep::kRows, FarStep::kResults}) {
        if (step == FarStep::kRows) ranks.there.refuse(1, true);
        CHECK(ranks.there.wait(step, 1, deadline_in(20), {}).result == FarResult::kReady);
      }
      here.await(StreamWord::kRows);
      std::optional<StreamFailure> failure = here.proxy.failure();
      REQUIRE(failure);
      CHECK(failure->is_over);
    }
    for (const EngineRef& engine : ranks.engines) engine->close();
  }
}

TEST_CASE("moe stream: stop lets go of who waits") {
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  TwoRanks ranks(layout, memory);
  {
    StreamRank here(ranks, layout, memory, 0, kDeadlineNs);
    here.dispatch_send();
    std::thread stream([&] { here.await(StreamWord::kRows); });
    here.proxy.stop();
    stream.join();
    CHECK_FALSE(here.proxy.failure());
  }
  for (const EngineRef& engine : ranks.engines) engine->close();
}

TEST_CASE("moe stream: several threads may stop it at once") {
  const Layout layout(shape(kTokens));
  const FarMemory memory = rows_memory();
  TwoRanks ranks(layout, memory);
  for (int i = 0; i < 200; ++i) {
    StreamRank here(ranks, layout, memory, 0, kDeadlineNs);
    std::barrier begin(2);
    std::thread other([&] {
      begin.arrive_and_wait();
      CHECK_NOTHROW(here.proxy.stop());
    });
    begin.arrive_and_wait();
    CHECK_NOTHROW(here.proxy.stop());
    other.join();
  }
  for (const EngineRef& engine : ranks.engines) engine->close();
}

}  // namespace crossrail::moe
