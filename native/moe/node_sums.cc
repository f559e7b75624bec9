#include "moe/node_sums.h"

#include <algorithm>
#include <string>
#include <utility>

#include "util/errors.h"

namespace crossrail::moe {

namespace {

bool is_partner(const Layout& layout, uint32_t rank, uint32_t origin) {
  return layout.index_in_node(origin) % layout.node_size(layout.node_of(rank)) == layout.index_in_node(rank);
}

// Where the origin's rows begin among all rows that rank got from far, in the order of Placement::return_far.
size_t first_tag(const Placement& placement, uint32_t rank, uint32_t origin) {
  size_t first = 0;
  for (uint32_t group = 0; group < origin; ++group) {
    if (!placement.layout().near(group, rank)) first += static_cast<size_t>(placement.routes(group, rank));
  }
  return first;
}

// Calls visit(route, node) for each route that is not masked, token by token. Throws UsageError for an invalid expert
// index.
template <typename Index, typename Visit>
void visit_routes(const Layout& layout, std::span<const Index> indices, Visit visit) {
  for (size_t route = 0; route < indices.size(); ++route) {
    const Index expert = indices[route];
    if (expert < 0) continue;
    if (expert >= static_cast<int64_t>(layout.shape().experts)) {
      throw UsageError("indices: route " + std::to_string(route) + " goes to expert " + std::to_string(expert) +
                       ", must be less than " + std::to_string(layout.shape().experts));
    }
    visit(route, layout.node_of(layout.rank_of_expert(static_cast<uint32_t>(expert))));
  }
}

// Counts the tokens of each node: true if a token is seen there for the first time.
class NodeSlots {
 public:
  explicit NodeSlots(uint32_t nodes) : counts_(nodes), last_(nodes, -1) {}
  bool is_first(int64_t token, uint32_t node) {
    if (last_[node] == token) return false;
    last_[node] = token;
    ++counts_[node];
    return true;
  }
  int32_t slot(uint32_t node) const { return counts_[node] - 1; }
  std::vector<int32_t> take_counts() { return std::move(counts_); }

 private:
  std::vector<int32_t> counts_;
  std::vector<int64_t> last_;
};

}  // namespace

std::vector<uint32_t> partners(const Layout& layout, uint32_t origin) {
  std::vector<uint32_t> found = layout.far_ranks_in_turn(origin);
  std::erase_if(found, [&](uint32_t other) { return !is_partner(layout, other, origin); });
  return found;
}

std::vector<uint32_t> origins(const Layout& layout, uint32_t rank) {
  std::vector<uint32_t> found = layout.far_ranks_in_turn(rank);
  std::erase_if(found, [&](uint32_t other) { return !is_partner(layout, rank, other); });
  return found;
}

uint32_t far_node(const Layout& layout, uint32_t origin, uint32_t partner) {
  const uint32_t node = layout.node_of(partner);
  return node < layout.node_of(origin) ? node : node - 1;
}

template <typename Index>
std::vector<int32_t> node_tokens(const Layout& layout, std::span<const Index> indices) {
  NodeSlots slots(layout.nodes());
  visit_routes(layout, indices, [&](size_t route, uint32_t node) {
    slots.is_first(static_cast<int64_t>(route / layout.shape().top_k), node);
  });
  return slots.take_counts();
}

template std::vector<int32_t> node_tokens(const Layout&, std::span<const int32_t>);
template std::vector<int32_t> node_tokens(const Layout&, std::span<const int64_t>);

Terms terms_to_send(const Placement& placement, uint32_t rank, uint32_t origin,
                    std::span<const std::span<const Tag>> tags) {
  const Layout& layout = placement.layout();
  const std::vector<uint32_t> near = layout.near_ranks(rank);
  if (tags.size() != near.size())
    throw UsageError("tags has " + std::to_string(tags.size()) + " lists, must have " + std::to_string(near.size()) +
                     ", one for each rank of the node");
  const auto top_k = static_cast<size_t>(layout.shape().top_k);
  const size_t routes_max = layout.shape().max_tokens * top_k;
  std::vector<std::vector<Tag>> kept(near.size());
  std::vector<int32_t> row_of_token(layout.shape().max_tokens, -1);
  for (size_t source = 0; source < near.size(); ++source) {
    const size_t first = first_tag(placement, near[source], origin);
    const auto count = static_cast<size_t>(placement.routes(origin, near[source]));
    if (first + count > tags[source].size())
      throw UsageError("tags[" + std::to_string(source) + "] has " + std::to_string(tags[source].size()) +
                       " tags, must have at least " + std::to_string(first + count) + ", by the counts");
    const std::span<const Tag> given = tags[source].subspan(first, count);
    kept[source].assign(given.begin(), given.end());
    for (const Tag& tag : kept[source]) {
      if (tag.route < 0 || static_cast<size_t>(tag.route) >= routes_max) {
        throw UsageError("tags: rank " + std::to_string(near[source]) + " tells of route " + std::to_string(tag.route) +
                         " of rank " + std::to_string(origin) + ", must be in [0, " + std::to_string(routes_max) + ")");
      }
      row_of_token[static_cast<size_t>(tag.route) / top_k] = 0;
    }
  }
  size_t rows = 0;
  for (int32_t& row : row_of_token) {
    if (row == 0) row = static_cast<int32_t>(rows++);
  }
  Terms terms{std::vector<Place>(rows * top_k, Place{-1, -1}), std::vector<float>(rows * top_k)};
  for (size_t source = 0; source < near.size(); ++source) {
    const std::vector<int32_t> outputs = placement.rows_of(origin, near[source]);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Tag& tag = kept[source][i];
      const size_t token = static_cast<size_t>(tag.route) / top_k;
      const size_t at = static_cast<size_t>(row_of_token[token]) * top_k + static_cast<size_t>(tag.route) % top_k;
      terms.where[at] = {static_cast<int32_t>(source), outputs[i]};
      terms.weights[at] = tag.weight;
    }
  }
  return terms;
}

template <typename Index>
Terms terms_to_take(const Placement& placement, uint32_t origin, std::span<const Index> indices,
                    std::span<const int32_t> slots, std::span<const float> weights) {
  const Layout& layout = placement.layout();
  if (weights.size() != indices.size())
    throw UsageError("weights has " + std::to_string(weights.size()) + " numbers, must have " +
                     std::to_string(indices.size()) + ", one for each of indices");
  Terms terms{placement.places(origin, indices, slots), {weights.begin(), weights.end()}};
  const uint32_t own = layout.node_of(origin);
  const auto far = static_cast<int32_t>(layout.near_ranks(origin).size());
  NodeSlots rows(layout.nodes());
  visit_routes(layout, indices, [&](size_t route, uint32_t node) {
    if (node == own) return;
    if (!rows.is_first(static_cast<int64_t>(route / layout.shape().top_k), node)) {
      terms.where[route] = {-1, -1};
      return;
    }
    const uint32_t index = node < own ? node : node - 1;
    const auto first = static_cast<int32_t>(index * layout.shape().max_tokens);
    terms.where[route] = {far, first + rows.slot(node)};
    terms.weights[route] = 1.0F;
  });
  return terms;
}

template Terms terms_to_take(const Placement&, uint32_t, std::span<const int32_t>, std::span<const int32_t>,
                             std::span<const float>);
template Terms terms_to_take(const Placement&, uint32_t, std::span<const int64_t>, std::span<const int32_t>,
                             std::span<const float>);

}  // namespace crossrail::moe
