#include "moe/layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "util/errors.h"

namespace crossrail::moe {

namespace {

constexpr int64_t kRowsMax = std::numeric_limits<int32_t>::max();

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

void require(bool holds, const char* argument, uint64_t value, const std::string& bound) {
  if (!holds) throw UsageError(std::string(argument) + " is " + std::to_string(value) + ", must be " + bound);
}

void require_order(std::span<const int32_t> order, int32_t routes) {
  if (order.size() >= static_cast<size_t>(routes)) return;
  throw UsageError("order has " + std::to_string(order.size()) + " entries, must have at least " +
                   std::to_string(routes) + ", the number of routes by the counts");
}

// The token of an entry in a group's order, which may contain anything.
int32_t require_token(int32_t route, const LayoutShape& shape, uint32_t group) {
  const int64_t end = int64_t{shape.max_tokens} * shape.top_k;
  if (route >= 0 && route < end) return route / static_cast<int32_t>(shape.top_k);
  throw UsageError("order: group " + std::to_string(group) + " tells of route " + std::to_string(route) +
                   ", must be in [0, " + std::to_string(end) + ")");
}

// Whether the route named by an index and a slot exists.
template <typename Index>
void require_route(Index expert, int32_t slot, int32_t count, size_t route) {
  if (slot >= 0 && slot < count) return;
  throw UsageError("slots: route " + std::to_string(route) + " to expert " + std::to_string(expert) + " has slot " +
                   std::to_string(slot) + ", must be in [0, " + std::to_string(count) + "), the count of that expert");
}

template <typename Index>
void require_expert(Index expert, size_t experts, size_t route) {
  if (expert >= -1 && expert < static_cast<int64_t>(experts)) return;
  throw UsageError("indices: route " + std::to_string(route) + " goes to expert " + std::to_string(expert) +
                   ", must be in [0, " + std::to_string(experts) + "), or -1 for none");
}

}  // namespace

std::vector<uint32_t> split_evenly(uint32_t experts, uint32_t world) {
  const uint64_t each = (uint64_t{experts} - 1) / world + 1;
  std::vector<uint32_t> counts(world);
  uint64_t left = experts;
  for (uint32_t& count : counts) {
    count = static_cast<uint32_t>(std::min(each, left));
    left -= count;
  }
  return counts;
}

Layout::Layout(LayoutShape shape) : shape_(std::move(shape)) {
  require(shape_.world >= 1, "world", shape_.world, "1 or more");
  require(shape_.experts >= 1, "experts", shape_.experts, "1 or more");
  require(shape_.top_k >= 1, "top_k", shape_.top_k, "1 or more");
  require(shape_.dp_size >= 1 && shape_.world % shape_.dp_size == 0, "dp_size", shape_.dp_size,
          "a divisor of world, " + std::to_string(shape_.world));
  require(shape_.padding >= 1, "padding", shape_.padding, "1 or more");
  const std::vector<uint32_t> counts =
      shape_.experts_per_rank.empty() ? split_evenly(shape_.experts, shape_.world) : shape_.experts_per_rank;
  require(counts.size() == shape_.world, "len(experts_per_rank)", counts.size(),
          "world, " + std::to_string(shape_.world));
  const uint64_t sum = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  require(sum == shape_.experts, "sum of experts_per_rank", sum, "experts, " + std::to_string(shape_.experts));
  experts_per_rank_max_ = *std::max_element(counts.begin(), counts.end());
  first_experts_.assign(shape_.world + size_t{1}, 0);
  std::partial_sum(counts.begin(), counts.end(), first_experts_.begin() + 1);
  node_of_rank_ = shape_.node_of_rank.empty() ? std::vector<uint32_t>(shape_.world) : shape_.node_of_rank;
  require(node_of_rank_.size() == shape_.world, "len(node_of_rank)", node_of_rank_.size(),
          "world, " + std::to_string(shape_.world));
  std::vector<uint32_t> names(node_of_rank_);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  for (uint32_t& node : node_of_rank_)
    node = static_cast<uint32_t>(std::lower_bound(names.begin(), names.end(), node) - names.begin());
  node_sizes_.resize(names.size());
  for (const uint32_t node : node_of_rank_) indices_in_node_.push_back(node_sizes_[node]++);
  // Bounds every sum of rows below: all routes of all groups, each expert's rows padded, and all slots.
  const auto bound = static_cast<unsigned __int128>(kRowsMax);
  const auto wide = [](uint64_t value) { return static_cast<unsigned __int128>(value); };
  const unsigned __int128 routes = wide(groups()) * shape_.max_tokens * shape_.top_k;
  const unsigned __int128 rows = routes + wide(experts_per_rank_max_) * (shape_.padding - 1) +
                                 wide(groups()) * shape_.private_rows +
                                 wide(experts_per_rank_max_) * shape_.rows_per_expert;
  if (rows > bound) {
    throw UsageError("world is " + std::to_string(shape_.world) + ", max_tokens " + std::to_string(shape_.max_tokens) +
                     ", top_k " + std::to_string(shape_.top_k) + ", padding " + std::to_string(shape_.padding) +
                     ", private_rows " + std::to_string(shape_.private_rows) + " and rows_per_expert " +
                     std::to_string(shape_.rows_per_expert) + ": these make more rows at one rank than " +
                     std::to_string(kRowsMax));
  }
  rank_of_expert_.reserve(shape_.experts);
  for (uint32_t rank = 0; rank < shape_.world; ++rank)
    rank_of_expert_.insert(rank_of_expert_.end(), counts[rank], rank);
}

void Layout::require_rank(uint32_t rank) const {
  require(rank < shape_.world, "rank", rank, "less than world, " + std::to_string(shape_.world));
}

std::vector<uint32_t> Layout::near_ranks(uint32_t rank) const {
  std::vector<uint32_t> ranks;
  for (uint32_t other = 0; other < shape_.world; ++other) {
    if (same_node(rank, other)) ranks.push_back(other);
  }
  return ranks;
}

std::vector<uint32_t> Layout::far_ranks_in_turn(uint32_t rank) const {
  std::vector<std::pair<uint64_t, uint32_t>> far;  // position in turn, rank
  for (uint32_t other = 0; other < shape_.world; ++other) {
    if (same_node(rank, other)) continue;
    const uint32_t size = node_size(node_of_rank_[other]);
    const uint64_t node = (node_of_rank_[other] + nodes() - node_of_rank_[rank]) % nodes();
    far.emplace_back(node * shape_.world + (index_in_node(other) + size - index_in_node(rank) % size) % size, other);
  }
  std::sort(far.begin(), far.end());
  std::vector<uint32_t> ranks;
  for (const auto& [when, other] : far) ranks.push_back(other);
  return ranks;
}

uint32_t Layout::far_index(uint32_t group, uint32_t rank) const {
  uint32_t index = 0;
  for (uint32_t other = 0; other < group; ++other) index += near(other, rank) ? 0 : 1;
  return index;
}

Placement::Placement(const Layout& layout, std::span<const int32_t> counts)
    : layout_(layout), counts_(counts.begin(), counts.end()) {
  const LayoutShape& shape = layout.shape();
  const uint32_t groups = layout.groups();
  require(counts_.size() == uint64_t{groups} * shape.experts, "len(counts)", counts_.size(),
          std::to_string(groups) + " groups x " + std::to_string(shape.experts) + " experts");
  routes_.resize(size_t{groups} * shape.world);
  totals_.resize(shape.experts);
  const int64_t routes_max = int64_t{shape.max_tokens} * shape.top_k;
  for (uint32_t group = 0; group < groups; ++group) {
    const int32_t* row = &counts_[size_t{group} * shape.experts];
    const int32_t* end = row + shape.experts;
    const int32_t* negative = std::find_if(row, end, [](int32_t count) { return count < 0; });
    if (negative != end) {
      throw UsageError("counts: group " + std::to_string(group) + " has " + std::to_string(*negative) +
                       " routes to expert " + std::to_string(negative - row) + ", must be 0 or more");
    }
    const int64_t sum = std::accumulate(row, end, int64_t{0});
    if (sum > routes_max) {
      throw UsageError("counts: group " + std::to_string(group) + " has " + std::to_string(sum) +
                       " routes, must be at most max_tokens x top_k, " + std::to_string(routes_max));
    }
    for (uint32_t expert = 0; expert < shape.experts; ++expert) totals_[expert] += row[expert];
    for (uint32_t rank = 0; rank < shape.world; ++rank) {
      routes_[size_t{group} * shape.world + rank] =
          std::accumulate(row + layout.first_expert(rank), row + layout.first_expert(rank + 1), 0);
    }
  }
  offsets_.resize(shape.experts);
  for (uint32_t expert = 0; expert < shape.experts; ++expert) {
    const uint32_t local = expert - layout.first_expert(layout.rank_of_expert(expert));
    if (shape.rows_per_expert > 0) {
      offsets_[expert] = int64_t{local} * shape.rows_per_expert;
    } else if (local > 0) {
      offsets_[expert] = offsets_[expert - 1] + round_up(totals_[expert - 1], shape.padding);
    }
  }
}

std::vector<int32_t> Placement::expert_rows(uint32_t rank) const {
  return {totals_.begin() + layout_.first_expert(rank), totals_.begin() + layout_.first_expert(rank + 1)};
}

std::vector<int32_t> Placement::expert_offsets(uint32_t rank) const {
  std::vector<int32_t> offsets(offsets_.begin() + layout_.first_expert(rank),
                               offsets_.begin() + layout_.first_expert(rank + 1));
  offsets.push_back(static_cast<int32_t>(rows_needed(rank)));
  return offsets;
}

int64_t Placement::routes_to(uint32_t rank) const {
  const auto first = totals_.begin() + layout_.first_expert(rank);
  return std::accumulate(first, first + layout_.expert_count(rank), int64_t{0});
}

int64_t Placement::rows_needed(uint32_t rank) const {
  const LayoutShape& shape = layout_.shape();
  if (layout_.expert_count(rank) == 0) return 0;
  if (shape.rows_per_expert > 0) return int64_t{layout_.expert_count(rank)} * shape.rows_per_expert;
  const uint32_t last = layout_.first_expert(rank + 1) - 1;
  return offsets_[last] + round_up(totals_[last], shape.padding);
}

int32_t Placement::fullest_expert(uint32_t rank) const {
  int32_t most = 0;
  for (uint32_t e = layout_.first_expert(rank); e < layout_.first_expert(rank + 1); ++e)
    most = std::max(most, totals_[e]);
  return most;
}

int64_t Placement::far_rows_needed(uint32_t rank) const { return remainder_start(layout_.groups(), rank); }

int32_t Placement::most_routes(uint32_t rank) const {
  int32_t most = 0;
  for (uint32_t group = 0; group < layout_.groups(); ++group) most = std::max(most, routes(group, rank));
  return most;
}

std::optional<uint32_t> Placement::first_over(std::span<const int64_t> rows, std::span<const int32_t> routes,
                                              std::span<const uint32_t> left_out) const {
  if (rows.size() != layout_.shape().world || routes.size() != rows.size())
    throw UsageError("rows has " + std::to_string(rows.size()) + " numbers and routes " +
                     std::to_string(routes.size()) + ", must have " + std::to_string(layout_.shape().world) +
                     " each, one for each rank");
  for (uint32_t rank = 0; rank < layout_.shape().world; ++rank) {
    if (std::ranges::find(left_out, rank) != left_out.end()) continue;
    const int64_t needed = layout_.shape().rows_per_expert > 0 ? fullest_expert(rank) : rows_needed(rank);
    if (needed > rows[rank] || most_routes(rank) > routes[rank]) return rank;
  }
  return std::nullopt;
}

int32_t Placement::route_start(uint32_t group, uint32_t rank) const {
  const int32_t* row = &routes_[size_t{group} * layout_.shape().world];
  return std::accumulate(row, row + rank, 0);
}

std::vector<int32_t> Placement::route_starts(uint32_t group) const {
  const uint32_t experts = layout_.shape().experts;
  std::vector<int32_t> starts(experts + 1);
  const int32_t* row = &counts_[size_t{group} * experts];
  std::partial_sum(row, row + experts, starts.begin() + 1);
  return starts;
}

int32_t Placement::private_start(uint32_t group, uint32_t rank) const {
  return static_cast<int32_t>(layout_.far_index(group, rank) * layout_.shape().private_rows);
}

int32_t Placement::remainder_start(uint32_t group, uint32_t rank) const {
  const auto slot = static_cast<int32_t>(layout_.shape().private_rows);
  auto start = static_cast<int32_t>(layout_.far_groups(rank)) * slot;
  for (uint32_t before = 0; before < group; ++before) {
    if (!layout_.near(before, rank)) start += std::max(routes(before, rank) - slot, 0);
  }
  return start;
}

std::vector<int32_t> Placement::first_rows(uint32_t group, uint32_t first, uint32_t last) const {
  std::vector<int32_t> rows(offsets_.begin() + first, offsets_.begin() + last);
  for (uint32_t before = 0; before < group; ++before) {
    for (uint32_t expert = first; expert < last; ++expert) rows[expert - first] += count(before, expert);
  }
  return rows;
}

template <typename Visit>
void Placement::visit_experts(uint32_t group, uint32_t rank, Visit visit) const {
  const uint32_t first = layout_.first_expert(rank);
  const std::vector<int32_t> rows = first_rows(group, first, layout_.first_expert(rank + 1));
  for (uint32_t i = 0; i < rows.size(); ++i) visit(first + i, rows[i], count(group, first + i));
}

std::vector<Move> Placement::pull_near(uint32_t group, uint32_t rank, std::span<const int32_t> order) const {
  const std::vector<int32_t> starts = route_starts(group);
  require_order(order, starts.back());
  const uint32_t first = layout_.first_expert(rank);
  const auto here = order.subspan(starts[first], static_cast<size_t>(routes(group, rank)));
  // By token, so that a reader copies a row to all of its places while it is in the caches: a counting sort.
  std::vector<int32_t> tokens(here.size());
  std::vector<int32_t> places(layout_.shape().max_tokens + size_t{1});
  for (size_t i = 0; i < here.size(); ++i) {
    const int32_t route = here[i];
    tokens[i] = require_token(route, layout_.shape(), group);
    ++places[static_cast<size_t>(tokens[i]) + 1];
  }
  std::partial_sum(places.begin(), places.end(), places.begin());
  std::vector<Move> moves(here.size());
  const int32_t* token = tokens.data();
  visit_experts(group, rank, [&](uint32_t, int32_t row, int32_t routes) {
    for (int32_t i = 0; i < routes; ++i, ++token) {
      moves[static_cast<size_t>(places[static_cast<size_t>(*token)]++)] = {*token, row + i};
    }
  });
  return moves;
}

std::vector<Move> Placement::pull_far(uint32_t rank) const {
  const auto slot = static_cast<int32_t>(layout_.shape().private_rows);
  std::vector<Move> moves;
  for (uint32_t group = 0; group < layout_.groups(); ++group) {
    if (layout_.near(group, rank)) continue;
    const int32_t own = private_start(group, rank);
    const int32_t remainder = remainder_start(group, rank) - slot;
    int32_t arrived = 0;
    visit_experts(group, rank, [&](uint32_t, int32_t row, int32_t routes) {
      for (int32_t i = 0; i < routes; ++i, ++arrived) {
        moves.push_back({(arrived < slot ? own : remainder) + arrived, row + i});
      }
    });
  }
  return moves;
}

Ranges Placement::send_far(uint32_t rank, std::span<const int32_t> order) const {
  const uint32_t group = layout_.group_of(rank);
  const std::vector<int32_t> starts = route_starts(group);
  require_order(order, starts.back());
  const uint32_t dp_size = layout_.shape().dp_size;
  Ranges ranges;
  ranges.starts.push_back(0);
  for (uint32_t to = 0; to < layout_.shape().world; ++to) {
    if (to % dp_size == rank % dp_size && !layout_.same_node(rank, to)) {
      const int32_t last = starts[layout_.first_expert(to + 1)];
      for (int32_t i = starts[layout_.first_expert(to)]; i < last; ++i) {
        const int32_t route = order[i];
        require_token(route, layout_.shape(), group);
        ranges.rows.push_back(route);
      }
    }
    ranges.starts.push_back(static_cast<int32_t>(ranges.rows.size()));
  }
  return ranges;
}

std::vector<int32_t> Placement::rows_of(uint32_t group, uint32_t rank) const {
  std::vector<int32_t> rows;
  visit_experts(group, rank, [&](uint32_t, int32_t row, int32_t routes) {
    for (int32_t i = 0; i < routes; ++i) rows.push_back(row + i);
  });
  return rows;
}

Ranges Placement::return_far(uint32_t rank) const {
  const uint32_t dp_size = layout_.shape().dp_size;
  Ranges ranges;
  ranges.starts.push_back(0);
  for (uint32_t group = 0; group < layout_.groups(); ++group) {
    bool far = false;
    for (uint32_t member = 0; member < dp_size; ++member) far |= !layout_.same_node(group * dp_size + member, rank);
    if (far) {
      const std::vector<int32_t> rows = rows_of(group, rank);
      ranges.rows.insert(ranges.rows.end(), rows.begin(), rows.end());
    }
    ranges.starts.push_back(static_cast<int32_t>(ranges.rows.size()));
  }
  return ranges;
}

template <typename Index>
std::vector<Place> Placement::places(uint32_t origin, std::span<const Index> indices,
                                     std::span<const int32_t> slots) const {
  const uint32_t experts = layout_.shape().experts;
  const uint32_t group = layout_.group_of(origin);
  require(slots.size() == indices.size(), "len(slots)", slots.size(),
          std::to_string(indices.size()) + ", the length of indices");
  // By expert: the source that has its rows, and our first one.
  std::vector<Place> first(experts);
  const std::vector<int32_t> starts = route_starts(group);
  const std::vector<int32_t> rows = first_rows(group, 0, experts);
  const std::vector<uint32_t> near = layout_.near_ranks(origin);
  for (uint32_t expert = 0; expert < experts; ++expert) {
    const auto found = std::lower_bound(near.begin(), near.end(), layout_.rank_of_expert(expert));
    const bool is_near = found != near.end() && *found == layout_.rank_of_expert(expert);
    first[expert] = is_near ? Place{static_cast<int32_t>(found - near.begin()), rows[expert]}
                            : Place{static_cast<int32_t>(near.size()), starts[expert]};
  }
  std::vector<Place> places(indices.size());
  for (size_t route = 0; route < indices.size(); ++route) {
    const Index expert = indices[route];
    require_expert(expert, experts, route);
    if (expert < 0) {
      places[route] = {-1, -1};
      continue;
    }
    const int32_t slot = slots[route];
    require_route(expert, slot, count(group, static_cast<uint32_t>(expert)), route);
    places[route] = {first[static_cast<size_t>(expert)].source, first[static_cast<size_t>(expert)].row + slot};
  }
  return places;
}

template std::vector<Place> Placement::places(uint32_t, std::span<const int32_t>, std::span<const int32_t>) const;
template std::vector<Place> Placement::places(uint32_t, std::span<const int64_t>, std::span<const int32_t>) const;

template <typename Index>
std::vector<int32_t> sort_routes(std::span<const Index> indices, std::span<const int32_t> slots,
                                 std::span<const int32_t> counts) {
  require(slots.size() == indices.size(), "len(slots)", slots.size(),
          std::to_string(indices.size()) + ", the length of indices");
  const auto negative = std::find_if(counts.begin(), counts.end(), [](int32_t count) { return count < 0; });
  if (negative != counts.end()) {
    throw UsageError("counts[" + std::to_string(negative - counts.begin()) + "] is " + std::to_string(*negative) +
                     ", must be 0 or more");
  }
  std::vector<int64_t> starts(counts.size() + 1);
  for (size_t expert = 0; expert < counts.size(); ++expert) starts[expert + 1] = starts[expert] + counts[expert];
  require(starts.back() <= static_cast<int64_t>(indices.size()), "sum of counts", static_cast<uint64_t>(starts.back()),
          "at most the number of indices, " + std::to_string(indices.size()));
  std::vector<int32_t> order(static_cast<size_t>(starts.back()));
  for (size_t route = 0; route < indices.size(); ++route) {
    const Index expert = indices[route];
    require_expert(expert, counts.size(), route);
    if (expert < 0) continue;
    const int32_t slot = slots[route];
    require_route(expert, slot, counts[static_cast<size_t>(expert)], route);
    order[static_cast<size_t>(starts[static_cast<size_t>(expert)] + slot)] = static_cast<int32_t>(route);
  }
  return order;
}

template std::vector<int32_t> sort_routes(std::span<const int32_t>, std::span<const int32_t>, std::span<const int32_t>);
template std::vector<int32_t> sort_routes(std::span<const int64_t>, std::span<const int32_t>, std::span<const int32_t>);

}  // namespace crossrail::moe
