// The rounds themselves are played in tests/moe/test_layout.py; here is arithmetic that can be followed by hand.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "moe/layout.h"
#include "moe/rows.h"
#include "util/errors.h"

namespace crossrail::moe {

namespace {

using Numbers = std::vector<int32_t>;

std::vector<std::vector<int32_t>> pairs(const std::vector<Move>& moves) {
  std::vector<std::vector<int32_t>> all;
  for (const Move move : moves) all.push_back({move.from, move.to});
  return all;
}

// Four ranks on two nodes, two experts each, rows of an expert from multiples of 4 on, slots of 2 rows.
const Layout& four_ranks() {
  static const Layout layout({.world = 4,
                              .experts = 8,
                              .top_k = 2,
                              .max_tokens = 4,
                              .private_rows = 2,
                              .padding = 4,
                              .node_of_rank = {0, 0, 1, 1}});
  return layout;
}

// Routes of rank 0 .. 3 to expert 0 .. 7.
const Numbers kCounts = {1, 2, 0, 0, 3, 1, 0, 0,   // 7
                         0, 1, 0, 0, 0, 0, 0, 4,   // 5
                         2, 2, 0, 0, 0, 0, 0, 0,   // 4
                         3, 0, 0, 0, 5, 0, 0, 0};  // 8

}  // namespace

TEST_CASE("moe layout: experts, groups and nodes") {
  const Layout uneven({.world = 3, .experts = 4});
  CHECK(uneven.experts_per_rank_max() == 2);
  CHECK(uneven.expert_count(1) == 2);
  CHECK(uneven.expert_count(2) == 0);
  CHECK(uneven.first_expert(2) == 4);
  const Layout given({.world = 4, .experts = 5, .experts_per_rank = {0, 3, 0, 2}});
  CHECK(given.experts_per_rank_max() == 3);
  CHECK(given.first_expert(1) == 0);
  CHECK(given.expert_count(2) == 0);
  CHECK(given.rank_of_expert(2) == 1);
  CHECK(given.rank_of_expert(3) == 3);
  CHECK_THROWS_AS(Layout({.world = 2, .experts = 5, .experts_per_rank = {1, 3}}), UsageError);
  CHECK_THROWS_AS(Layout({.world = 2, .experts = 5, .experts_per_rank = {1, 3, 1}}), UsageError);
  CHECK(four_ranks().near_ranks(2) == std::vector<uint32_t>{2, 3});
  CHECK(four_ranks().far_groups(2) == 2);
  CHECK(four_ranks().far_index(3, 0) == 1);

  const Layout pairs_of_ranks({.world = 4, .experts = 4, .dp_size = 2, .node_of_rank = {0, 1, 1, 1}});
  CHECK(pairs_of_ranks.groups() == 2);
  CHECK(pairs_of_ranks.near(1, 1));  // rank 1 is served by rank 3
  CHECK_FALSE(pairs_of_ranks.near(1, 0));
}

TEST_CASE("moe layout: rows of a rank") {
  const Placement placement(four_ranks(), kCounts);
  CHECK(placement.expert_rows(0) == Numbers{6, 5});
  CHECK(placement.expert_offsets(0) == Numbers{0, 8, 16});
  CHECK(placement.expert_rows(1) == Numbers{0, 0});
  CHECK(placement.expert_offsets(1) == Numbers{0, 0, 0});
  CHECK(placement.fullest_expert(2) == 8);
  CHECK(placement.routes_to(0) == 11);
  const auto first_over = [&](int64_t rows, int32_t routes, const std::vector<uint32_t>& left_out = {}) {
    return placement.first_over(std::vector<int64_t>(4, rows), Numbers(4, routes), left_out);
  };
  CHECK(first_over(1000, 1000) == std::nullopt);
  CHECK(first_over(placement.rows_needed(0) - 1, 1000) == 0);
  CHECK(first_over(placement.rows_needed(0), placement.most_routes(2) - 1) == 2);
  CHECK(first_over(0, 1000, {0, 1}) == 2);
  CHECK(first_over(0, 0, {3, 1, 0, 2}) == std::nullopt);
  std::vector<int64_t> rows(4, 1000);  // each rank has its own
  rows[2] = placement.rows_needed(2) - 1;
  CHECK(placement.first_over(rows, Numbers(4, 1000)) == 2);
  CHECK_THROWS_AS(placement.first_over(rows, Numbers(3, 1000)), UsageError);
  CHECK(placement.route_starts(0) == Numbers{0, 1, 3, 3, 3, 6, 7, 7, 7});
}

TEST_CASE("moe layout: slots first, remainders behind all slots") {
  const Placement placement(four_ranks(), kCounts);
  // Rank 0 gets four routes of rank 2 and three of rank 3: two in each slot, then two of rank 2 and one of rank 3.
  CHECK(placement.private_start(2, 0) == 0);
  CHECK(placement.private_start(3, 0) == 2);
  CHECK(placement.remainder_start(2, 0) == 4);
  CHECK(placement.remainder_start(3, 0) == 6);
  CHECK(placement.far_rows_needed(0) == 7);
  // Expert 0: one row of rank 0, then two of rank 2, then three of rank 3; expert 1 from row 8 on, two of rank 2 at
  // last.
  CHECK(pairs(placement.pull_far(0)) ==
        std::vector<std::vector<int32_t>>{{0, 1}, {1, 2}, {4, 11}, {5, 12}, {2, 3}, {3, 4}, {6, 5}});
}

TEST_CASE("moe layout: near rows go by token") {
  const Placement placement(four_ranks(), kCounts);
  // Rank 0's routes in order: expert 0: token 3; expert 1: tokens 0 and 3; the others are of no interest to ranks 0, 1.
  const Numbers order = {6, 0, 7, 1, 2, 4, 5};
  CHECK(pairs(placement.pull_near(0, 0, order)) == std::vector<std::vector<int32_t>>{{0, 8}, {3, 0}, {3, 9}});
  const Ranges far = placement.send_far(0, order);
  CHECK(far.rows == Numbers{1, 2, 4, 5});  // of tokens 0, 1, 2, 2
  CHECK(far.starts == Numbers{0, 0, 0, 4, 4});
}

TEST_CASE("moe layout: what one node returns to the other") {
  const Placement placement(four_ranks(), kCounts);
  const Ranges back = placement.return_far(0);
  CHECK(back.starts == Numbers{0, 0, 0, 4, 7});
  CHECK(back.rows == Numbers{1, 2, 11, 12, 3, 4, 5});
}

TEST_CASE("moe layout: masked rows stand at multiples, however many there are") {
  LayoutShape shape = four_ranks().shape();
  shape.rows_per_expert = 32;
  const Layout layout(shape);
  const Placement placement(layout, kCounts);
  CHECK(placement.expert_offsets(0) == Numbers{0, 32, 64});
  CHECK(placement.rows_needed(1) == 64);
}

TEST_CASE("moe layout: counting and sorting routes") {
  const Numbers indices = {2, 0, -1, 2, 2, 0};
  Numbers counts(3);
  Numbers slots(6);
  count_routes(std::span<const int32_t>(indices), 2, std::span(counts), std::span(slots));
  CHECK(counts == Numbers{2, 0, 3});
  CHECK(slots == Numbers{0, 0, -1, 1, 2, 1});
  CHECK(sort_routes(std::span<const int32_t>(indices), slots, counts) == Numbers{1, 5, 0, 3, 4});
}

TEST_CASE("moe layout: sums of counts cannot overflow") {
  const Layout layout({.world = 2, .experts = 2, .max_tokens = 1U << 29U});
  const Numbers most = {1 << 28, 1 << 28, 1 << 28, 1 << 28};
  CHECK(Placement(layout, most).expert_rows(0) == Numbers{1 << 29});
  const Numbers more = {INT32_MAX, INT32_MAX, 0, 0};
  CHECK_THROWS_AS(Placement(layout, more), UsageError);
  CHECK_THROWS_AS(Layout({.world = 4, .experts = 2, .max_tokens = 1U << 30U}), UsageError);
}

}  // namespace crossrail::moe
