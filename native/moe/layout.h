// Where rows go in a round of dispatch and combine: pure arithmetic on the table of route counts. Every rank has that
// table and computes the same places from it, so no rank is sent an offset.
//
// Words: a *route* is one (token, k) whose expert is not masked. A *group* is dp_size consecutive ranks that hold the
// same tokens; the group is the source of its routes. Experts are numbered rank by rank; a rank may have none. Group g
// sends to rank d from its member of d's index, g * dp_size + d % dp_size. The group is *near* d if that member and d
// are on one node, else *far*.
//
// The routes of a group are ordered by (expert, token, k). `starts[e]` is the position of its first route to expert e.
// Far rows arrive in a receive buffer. The first `private_rows` of each far group arrive in a slot of its own, which
// needs no counts. The remainder is behind all slots, one group after the other. (Idea: arXiv 2510.27656, 6.)
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace crossrail::moe {

// The same on all ranks.
struct LayoutShape {
  uint32_t world = 1;
  uint32_t experts = 1;
  uint32_t top_k = 1;
  uint32_t max_tokens = 1;             // per rank
  uint32_t dp_size = 1;                // divides world
  uint32_t private_rows = 0;           // in the slot that each far group has at each rank
  uint32_t padding = 1;                // each expert's rows begin at a multiple of this
  uint32_t rows_per_expert = 0;        // layout "masked": room for each expert, full or not; 0: layout "grouped"
  std::vector<uint32_t> node_of_rank;  // ranks with the same number share memory; empty: all ranks do
  std::vector<uint32_t> experts_per_rank = {};  // [world], `experts` in all; empty: split_evenly
};

// ceil(experts / world) for each rank while there are enough: the last ranks get fewer, or none. Both arguments are at
// least 1.
std::vector<uint32_t> split_evenly(uint32_t experts, uint32_t world);

// A row of a source, and the output row to which it goes.
struct Move {
  int32_t from;
  int32_t to;
};

// A row of a sum: row `row` of source `source`. -1: none.
struct Place {
  int32_t source;
  int32_t row;
};

// A table in ranges, one per rank or group: range i is [starts[i], starts[i + 1]).
struct Ranges {
  std::vector<int32_t> rows;
  std::vector<int32_t> starts;
};

// Which rank has which experts, and which ranks are near each other. Immutable; any thread.
class Layout {
 public:
  // Throws UsageError for a shape that is invalid, or whose rows do not fit 31 bits.
  explicit Layout(LayoutShape shape);

  const LayoutShape& shape() const { return shape_; }
  // Throws UsageError where there is no such rank.
  void require_rank(uint32_t rank) const;
  uint32_t groups() const { return shape_.world / shape_.dp_size; }
  uint32_t experts_per_rank_max() const { return experts_per_rank_max_; }
  // For rank == world: the number of experts.
  uint32_t first_expert(uint32_t rank) const { return first_experts_[rank]; }
  uint32_t expert_count(uint32_t rank) const { return first_expert(rank + 1) - first_expert(rank); }
  uint32_t rank_of_expert(uint32_t expert) const { return rank_of_expert_[expert]; }
  uint32_t node_of(uint32_t rank) const { return node_of_rank_[rank]; }  // from 0 on
  uint32_t nodes() const { return static_cast<uint32_t>(node_sizes_.size()); }
  uint32_t node_size(uint32_t node) const { return node_sizes_[node]; }           // ranks of it, 1 or more
  uint32_t index_in_node(uint32_t rank) const { return indices_in_node_[rank]; }  // by rank, from 0 on
  uint32_t group_of(uint32_t rank) const { return rank / shape_.dp_size; }
  bool same_node(uint32_t rank, uint32_t other) const { return node_of_rank_[rank] == node_of_rank_[other]; }
  // Whether the rank receives the group's rows through shared memory.
  bool near(uint32_t group, uint32_t rank) const {
    return same_node(group * shape_.dp_size + rank % shape_.dp_size, rank);
  }
  // Ascending, including the rank itself.
  std::vector<uint32_t> near_ranks(uint32_t rank) const;
  // The other ranks, in the order in which `rank` writes to them: the next node first, and in each node the rank with
  // its own index first. If all ranks begin together and nodes are of one size, at any time they write to different
  // ranks.
  std::vector<uint32_t> far_ranks_in_turn(uint32_t rank) const;
  // The index of the group's slot at the rank: how many groups with smaller numbers are far from it.
  uint32_t far_index(uint32_t group, uint32_t rank) const;
  uint32_t far_groups(uint32_t rank) const { return far_index(groups(), rank); }

 private:
  LayoutShape shape_;
  uint32_t experts_per_rank_max_ = 0;
  std::vector<uint32_t> first_experts_;   // [world + 1]
  std::vector<uint32_t> rank_of_expert_;  // [experts]
  std::vector<uint32_t> node_of_rank_;    // numbered from 0 on, in the order of the names given
  std::vector<uint32_t> node_sizes_;      // [nodes]
  std::vector<uint32_t> indices_in_node_;
};

// All places of one round. Immutable; any thread. The layout outlives the placement.
class Placement {
 public:
  // counts[g * experts + e]: routes of group g to expert e. They are copied before they are checked, since they may be
  // in memory that others write. Throws UsageError for a count, or a group's sum, that is impossible.
  Placement(const Layout& layout, std::span<const int32_t> counts);

  const Layout& layout() const { return layout_; }
  int32_t count(uint32_t group, uint32_t expert) const { return counts_[group * layout_.shape().experts + expert]; }
  // Routes of the group to the rank's experts.
  int32_t routes(uint32_t group, uint32_t rank) const { return routes_[group * layout_.shape().world + rank]; }
  // Routes of all groups to the rank's experts: the number of their rows, without padding.
  int64_t routes_to(uint32_t rank) const;

  // The output of dispatch at a rank: how many rows each of its experts has, and where these begin. The last offset is
  // the number of rows, padding included. Layout "grouped": experts are back to back. Layout "masked": they begin at
  // multiples of rows_per_expert, which a count may exceed.
  std::vector<int32_t> expert_rows(uint32_t rank) const;
  std::vector<int32_t> expert_offsets(uint32_t rank) const;
  // The number of rows that a rank needs, for callers with less room than the worst case: in its output, for its
  // fullest expert, and in its receive buffer for far rows (slots and remainder).
  int64_t rows_needed(uint32_t rank) const;
  int32_t fullest_expert(uint32_t rank) const;
  int64_t far_rows_needed(uint32_t rank) const;
  // The largest number of routes to the rank from one group.
  int32_t most_routes(uint32_t rank) const;
  // The first rank that needs more than its `rows` in its output (layout "masked": for its fullest expert), or that
  // gets more than its `routes` from one group. rows, routes: [world], else UsageError. left_out: ranks to skip.
  std::optional<uint32_t> first_over(std::span<const int64_t> rows, std::span<const int32_t> routes,
                                     std::span<const uint32_t> left_out = {}) const;

  // starts[e] of a group, for the rank's first expert.
  int32_t route_start(uint32_t group, uint32_t rank) const;
  // All starts[e] of a group; starts[experts] is the number of its routes.
  std::vector<int32_t> route_starts(uint32_t group) const;
  // Where the rows of a far group begin in the rank's receive buffer: in the slot, and in the remainder.
  int32_t private_start(uint32_t group, uint32_t rank) const;
  int32_t remainder_start(uint32_t group, uint32_t rank) const;

  // The rows that `rank` pulls from a near group, in the order of tokens; `from` is a token. `order` begins with the
  // group's list of routes (sort_routes); it may lie in memory that others write. Throws UsageError for an entry that
  // is no route of any group.
  std::vector<Move> pull_near(uint32_t group, uint32_t rank, std::span<const int32_t> order) const;
  // The rows that `rank` pulls from its own receive buffer, of all far groups.
  std::vector<Move> pull_far(uint32_t rank) const;
  // The routes, token * top_k + k, whose rows `rank` sends to far ranks. Range r is for rank r. It is empty for near
  // ranks, and for ranks that have another index in their group.
  Ranges send_far(uint32_t rank, std::span<const int32_t> order) const;
  // The output rows of the group's routes to the rank, in the order of routes.
  std::vector<int32_t> rows_of(uint32_t group, uint32_t rank) const;
  // The output rows that `rank` sends back in combine. Range g goes to all far ranks of group g, into their receive
  // buffers from row route_starts(g)[first_expert(rank)] on.
  Ranges return_far(uint32_t rank) const;
  // Where `origin` finds the result of each of its routes. indices and slots are [tokens * top_k], as count_routes
  // takes and gives them. source: an index in near_ranks(origin), and `row` is a row of that rank's expert outputs; or
  // the number of near ranks, and `row` is a row of the receive buffer for results. Throws UsageError for an index or
  // slot that the counts do not have.
  template <typename Index>
  std::vector<Place> places(uint32_t origin, std::span<const Index> indices, std::span<const int32_t> slots) const;

 private:
  // Calls visit(expert, first output row, routes) for the group's routes to the rank, in order.
  template <typename Visit>
  void visit_experts(uint32_t group, uint32_t rank, Visit visit) const;
  // For each expert in [first, last): the output row, at the expert's rank, of the group's first route to it.
  std::vector<int32_t> first_rows(uint32_t group, uint32_t first, uint32_t last) const;

  const Layout& layout_;
  std::vector<int32_t> counts_;
  std::vector<int32_t> routes_;   // [groups][world]
  std::vector<int32_t> totals_;   // of each expert
  std::vector<int64_t> offsets_;  // of each expert: its first output row, at its rank
};

// The list of a group's routes in their order: entry starts[e] + slot is token * top_k + k. There is one per route.
// indices, slots: [tokens * top_k], as count_routes takes and gives them. counts: [experts]. Throws UsageError for an
// index or slot that the counts do not have.
template <typename Index>
std::vector<int32_t> sort_routes(std::span<const Index> indices, std::span<const int32_t> slots,
                                 std::span<const int32_t> counts);

}  // namespace crossrail::moe
