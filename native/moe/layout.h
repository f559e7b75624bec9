// Where rows go in a round of dispatch and combine: pure arithmetic on the table of route counts, which every rank has and
// from which every rank computes the same places. Nobody is told an offset.
//
// Words: a *route* is one (token, k) whose expert is not masked. A *group* is dp_size consecutive ranks that hold the same
// tokens; its number is the source of its routes. Rank r has experts [r * El, (r + 1) * El), El = ceil(experts / world); the
// last ranks may have fewer, or none. Group g serves rank d through its member of d's own index, g * dp_size + d % dp_size;
// the two are *near* when that member and d are on one node, else *far*.
//
// Routes of a group have an order, by (expert, token, k). `starts[e]` is the position of its first route to expert e.
// Far rows arrive in a receive buffer: the first `private_rows` of each far group in a slot of its own, which needs no
// counts; the remainder behind all slots, one group after the other. (Idea of slots and remainder: arXiv 2510.27656, 6.)
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
  uint32_t max_tokens = 1;             // of a rank
  uint32_t dp_size = 1;                // divides world
  uint32_t private_rows = 0;           // of each far group at each rank
  uint32_t padding = 1;                // each expert's rows begin at a multiple of this
  uint32_t rows_per_expert = 0;        // "masked" layout: so many rows for each expert, full or not; 0: "grouped"
  std::vector<uint32_t> node_of_rank;  // ranks of one number share memory; empty: one node of all
};

// A source row and the output row that it goes to.
struct Move {
  int32_t from;
  int32_t to;
};

// One of the rows that are summed: of source `source`, row `row`; -1: none.
struct Place {
  int32_t source;
  int32_t row;
};

// Ranges of a table, one per rank or group: [starts[i], starts[i + 1]).
struct Ranges {
  std::vector<int32_t> rows;
  std::vector<int32_t> starts;
};

// Who has which experts, and who is near whom. Immutable; any thread.
class Layout {
 public:
  // Throws UsageError for a shape that makes no sense, or whose rows do not fit 31 bits.
  explicit Layout(LayoutShape shape);

  const LayoutShape& shape() const { return shape_; }
  uint32_t groups() const { return shape_.world / shape_.dp_size; }
  uint32_t experts_per_rank() const { return experts_per_rank_; }
  uint32_t first_expert(uint32_t rank) const;
  uint32_t expert_count(uint32_t rank) const { return first_expert(rank + 1) - first_expert(rank); }
  uint32_t rank_of_expert(uint32_t expert) const { return expert / experts_per_rank_; }
  uint32_t node_of(uint32_t rank) const { return node_of_rank_[rank]; }  // from 0 on
  uint32_t nodes() const { return nodes_; }
  uint32_t group_of(uint32_t rank) const { return rank / shape_.dp_size; }
  bool same_node(uint32_t rank, uint32_t other) const { return node_of_rank_[rank] == node_of_rank_[other]; }
  // Whether rank gets the group's rows without a rail.
  bool near(uint32_t group, uint32_t rank) const {
    return same_node(group * shape_.dp_size + rank % shape_.dp_size, rank);
  }
  // Ascending; with itself.
  std::vector<uint32_t> near_ranks(uint32_t rank) const;
  // The others, in the order in which rank writes to them: the next node first, in each node the rank of its own index
  // first. At any time all write to different ones, where all began together.
  std::vector<uint32_t> far_ranks_in_turn(uint32_t rank) const;
  // How many far groups with smaller numbers rank has: which of its slots is the group's.
  uint32_t far_index(uint32_t group, uint32_t rank) const;
  uint32_t far_groups(uint32_t rank) const { return far_index(groups(), rank); }

 private:
  LayoutShape shape_;
  uint32_t experts_per_rank_;
  std::vector<uint32_t> node_of_rank_;  // numbered from 0 on, in the order of the names given
  uint32_t nodes_ = 0;
};

// All places of one round. Immutable; any thread. The layout outlives it.
class Placement {
 public:
  // counts[g * experts + e]: routes of group g to expert e. Copied first, since it may lie in memory that others write.
  // Throws UsageError for a count, or a sum of a group, that no group can have.
  Placement(const Layout& layout, std::span<const int32_t> counts);

  const Layout& layout() const { return layout_; }
  int32_t count(uint32_t group, uint32_t expert) const { return counts_[group * layout_.shape().experts + expert]; }
  // Routes of the group to all experts of the rank.
  int32_t routes(uint32_t group, uint32_t rank) const { return routes_[group * layout_.shape().world + rank]; }
  // Of all groups: rows of the rank's experts, without padding.
  int64_t routes_to(uint32_t rank) const;

  // Output of dispatch at a rank: rows of each of its experts, and where they begin; offsets' last is the number of rows,
  // padding included. Grouped: back to back. Masked: at multiples of rows_per_expert, and a count may be greater.
  std::vector<int32_t> expert_rows(uint32_t rank) const;
  std::vector<int32_t> expert_offsets(uint32_t rank) const;
  // Rows needed at a rank, for who has fewer than the worst case: of its output, of its fullest expert, and of its receive
  // buffer for far rows (slots and remainder).
  int64_t rows_needed(uint32_t rank) const;
  int32_t fullest_expert(uint32_t rank) const;
  int64_t far_rows_needed(uint32_t rank) const;
  // Routes to a rank of the group that has most of them.
  int32_t most_routes(uint32_t rank) const;
  // The first rank that needs more rows than this, of its output (masked: of its fullest expert), or gets more routes than
  // this of some group.
  std::optional<uint32_t> first_over(int64_t rows, int32_t routes) const;

  // starts[e] of a group, of the first expert of the rank.
  int32_t route_start(uint32_t group, uint32_t rank) const;
  // starts[e] of a group; starts[experts] is the number of its routes.
  std::vector<int32_t> route_starts(uint32_t group) const;
  // Where the rows of a far group begin in the rank's receive buffer: the slot, and the remainder.
  int32_t private_start(uint32_t group, uint32_t rank) const;
  int32_t remainder_start(uint32_t group, uint32_t rank) const;

  // What rank pulls from a near group, by token: `order` is the group's list of routes (sort_routes), and perhaps more, and
  // may lie in memory that others write. Throws UsageError for an entry that is no route of any group; from: token.
  std::vector<Move> pull_near(uint32_t group, uint32_t rank, std::span<const int32_t> order) const;
  // What rank pulls from its own receive buffer, of all far groups.
  std::vector<Move> pull_far(uint32_t rank) const;
  // Routes whose rows `rank` sends to far ranks, token * top_k + k, by rank: range r is for rank r; empty for near ranks and those whose index
  // in their group is another.
  Ranges send_far(uint32_t rank, std::span<const int32_t> order) const;
  // Output rows of the group's routes to the rank, in their order.
  std::vector<int32_t> rows_of(uint32_t group, uint32_t rank) const;
  // Output rows that rank sends back in combine, by group: range g goes to all far ranks of group g, at rows
  // route_starts(g)[first_expert(rank)] and following of their receive buffers.
  Ranges return_far(uint32_t rank) const;
  // Where origin finds the result of each of its routes: indices and slots are [tokens * top_k], as count_routes takes and
  // gives them. source: the rank's index in near_ranks(origin), whose expert outputs `row` counts; or as many as there are
  // of these: the receive buffer of far rows. Throws UsageError for an index or slot that the counts do not have.
  template <typename Index>
  std::vector<Place> places(uint32_t origin, std::span<const Index> indices, std::span<const int32_t> slots) const;

 private:
  // Calls visit(expert, first output row, routes) for the group's routes to the rank, in order.
  template <typename Visit>
  void visit_experts(uint32_t group, uint32_t rank, Visit visit) const;
  // Output row, at its rank, of the group's first route to each expert in [first, last).
  std::vector<int32_t> first_rows(uint32_t group, uint32_t first, uint32_t last) const;

  const Layout& layout_;
  std::vector<int32_t> counts_;
  std::vector<int32_t> routes_;   // [groups][world]
  std::vector<int32_t> totals_;   // of each expert
  std::vector<int64_t> offsets_;  // output row of each expert's first, at its rank
};

// The list of a group's routes in their order: entry starts[e] + slot is token * top_k + k.
// indices, slots: [tokens * top_k], as count_routes takes and gives them; counts: [experts]. Returns as many as routes.
// Throws UsageError for an index or slot that the counts do not have.
template <typename Index>
std::vector<int32_t> sort_routes(std::span<const Index> indices, std::span<const int32_t> slots,
                                 std::span<const int32_t> counts);

}  // namespace crossrail::moe
