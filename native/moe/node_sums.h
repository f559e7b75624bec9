// Partial sums: the ranks of a node add up what their experts made of a token of another node, so that one row of it
// crosses the network for each node that has experts of it, and not one for each expert. (DeepEP does so in its normal
// mode, which is why its combine of a prefill takes a third less than the paper's, arXiv 2510.27656, 7.)
//
// Words: an *origin* is a rank whose tokens came from another node. Its *partner* in each node is the rank of its own
// index there: that one adds up, and writes the sums. A *tag* says what a far row is of; it travels in the row's last
// bytes. The sum of a token lies at the origin in row (place of the partner's node among its far nodes) * max_tokens +
// (how many earlier tokens have routes to that node): the origin knows that from its routes, the partner from the tags.
// Groups are single ranks here: dp_size is 1.
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

// As reduce_rows takes them: [tokens * top_k] each.
struct Terms {
  std::vector<Place> where;
  std::vector<float> weights;
};

// Partners of rank, in the order in which it writes to them. Throws UsageError where nodes are of different sizes.
std::vector<uint32_t> partners(const Layout& layout, uint32_t rank);

// Which of the origin's far nodes is the partner's, by node number.
uint32_t far_node(const Layout& layout, uint32_t origin, uint32_t partner);

// How many of the origin's tokens have routes to each node: rows that it gets of each far one. indices: [tokens *
// top_k]. Throws UsageError for an index of no expert.
template <typename Index>
std::vector<int32_t> node_tokens(const Layout& layout, std::span<const Index> indices);

// What rank adds up for its partner `origin`: one row of terms for each token of the origin that has routes to this
// node, ascending, terms in the order of k. source: index in near_ranks(rank). tags[i]: of that rank, as many as, and
// in the order of, Placement::return_far's rows; may lie in memory that others write. Throws UsageError for a tag that
// is of no route.
Terms terms_to_send(const Placement& placement, uint32_t rank, uint32_t origin,
                    std::span<const std::span<const Tag>> tags);

// What origin adds up: results of near experts by themselves, and where the first route of a token to a far node
// stands, that node's sum, with weight 1; as Placement::places otherwise. weights: [tokens * top_k].
template <typename Index>
Terms terms_to_take(const Placement& placement, uint32_t origin, std::span<const Index> indices,
                    std::span<const int32_t> slots, std::span<const float> weights);

}  // namespace crossrail::moe
