// Partial sums: the ranks of a node add up what their experts computed for a token of another node, so that one row per
// node with experts of the token crosses the network, rather than one per expert. (DeepEP does this in its normal mode,
// which is why its combine of a prefill takes a third less than the paper's, arXiv 2510.27656, 7.)
//
// Words: an *origin* is a rank whose tokens came from another node. Its *partner* in each node is the rank with the
// same index there, modulo the number of ranks there: the partner adds up and writes the sums. Where nodes are of one
// size each rank is the partner of its partners; a rank of a larger node than the origin's may be nobody's there, and
// one of a smaller node that of several. A *tag* identifies the route of a far row; it travels in
// the row's last bytes. The sum of a token is at the origin in row (index of the partner's node among its far nodes) *
// max_tokens + (number of earlier tokens with routes to that node): the origin knows that from its routes, the partner
// from the tags. Groups are single ranks here: dp_size is 1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moe/layout.h"

namespace crossrail::moe {

struct Tag {
  int32_t route;  // token * top_k + k
  float weight;
};
static_assert(sizeof(Tag) == 8);

// In the format of reduce_rows: [tokens * top_k] each.
struct Terms {
  std::vector<Place> where;
  std::vector<float> weights;
};

// The partners of origin, one in each other node, in the order of Layout::far_ranks_in_turn.
std::vector<uint32_t> partners(const Layout& layout, uint32_t origin);

// The origins that rank is the partner of, in the order in which it writes to them.
std::vector<uint32_t> origins(const Layout& layout, uint32_t rank);

// The index of the partner's node among the origin's far nodes, by node number.
uint32_t far_node(const Layout& layout, uint32_t origin, uint32_t partner);

// How many of the origin's tokens have routes to each node, which is the number of rows that it gets from each far one.
// indices: [tokens * top_k]. Throws UsageError for an invalid expert index.
template <typename Index>
std::vector<int32_t> node_tokens(const Layout& layout, std::span<const Index> indices);

// What rank adds up for `origin`, whose partner it is: one row of terms for each token of the origin that has routes to
// this node, ascending, with terms in the order of k. source: index in near_ranks(rank). tags[i]: the tags of that
// rank, one for each of Placement::return_far's rows, in the same order; may be in memory that others write. Throws
// UsageError for a tag that belongs to no route.
Terms terms_to_send(const Placement& placement, uint32_t rank, uint32_t origin,
                    std::span<const std::span<const Tag>> tags);

// What origin adds up: the results of near experts separately and, in place of a token's first route to a far node,
// that node's sum, with weight 1; otherwise as Placement::places. weights: [tokens * top_k].
template <typename Index>
Terms terms_to_take(const Placement& placement, uint32_t origin, std::span<const Index> indices,
                    std::span<const int32_t> slots, std::span<const float> weights);

}  // namespace crossrail::moe
