// crossrail._core.moe: where rows go. See moe/layout.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/gil.h"
#include "bindings/host_arrays.h"
#include "moe/layout.h"
#include "util/errors.h"

namespace crossrail::bindings {

namespace {

using moe::Layout;
using moe::Placement;
using Use = HostArray::Use;

void make_layout(Layout* self, nb::handle world, nb::handle experts, nb::handle top_k, nb::handle max_tokens,
                 nb::handle dp_size, nb::handle private_rows, nb::handle padding, nb::handle rows_per_expert,
                 const std::vector<uint32_t>& node_of_rank, const std::vector<uint32_t>& experts_per_rank) {
  new (self) Layout({.world = to_u32(world, "world"),
                     .experts = to_u32(experts, "experts"),
                     .top_k = to_u32(top_k, "top_k"),
                     .max_tokens = to_u32(max_tokens, "max_tokens"),
                     .dp_size = to_u32(dp_size, "dp_size"),
                     .private_rows = to_u32(private_rows, "private_rows"),
                     .padding = to_u32(padding, "padding"),
                     .rows_per_expert = to_u32(rows_per_expert, "rows_per_expert"),
                     .node_of_rank = node_of_rank,
                     .experts_per_rank = experts_per_rank});
}

uint32_t to_rank_of(const Layout& layout, nb::handle rank) { return to_u32(rank, "rank", layout.shape().world - 1); }
uint32_t to_group(const Layout& layout, nb::handle group) { return to_u32(group, "group", layout.groups() - 1); }

nb::object ranges_to_tuple(moe::Ranges ranges) {
  return nb::make_tuple(to_numpy(std::move(ranges.rows)), to_numpy(std::move(ranges.starts)));
}

// Calls `make` with the GIL released.
template <typename Make>
auto without_gil(Make make) {
  const WithoutGil no_gil;
  return make();
}

void make_placement(Placement* self, const Layout& layout, nb::handle counts) {
  const HostArray table(counts, "counts", Use::kRead, 2);
  table.require_size(0, layout.groups(), "groups of ranks with the same tokens");
  table.require_size(1, layout.shape().experts, "experts");
  const std::span<const int32_t> numbers = table.numbers<int32_t>();
  const WithoutGil no_gil;
  new (self) Placement(layout, numbers);
}

nb::object pull_near(const Placement& self, nb::handle group, nb::handle rank, nb::handle order) {
  const HostArray routes(order, "order", Use::kRead, 1);
  const uint32_t from = to_group(self.layout(), group);
  const uint32_t to = to_rank_of(self.layout(), rank);
  const std::span<const int32_t> numbers = routes.numbers<int32_t>();
  return pairs_to_numpy(without_gil([&] { return self.pull_near(from, to, numbers); }));
}

nb::object pull_far(const Placement& self, nb::handle rank) {
  const uint32_t to = to_rank_of(self.layout(), rank);
  return pairs_to_numpy(without_gil([&] { return self.pull_far(to); }));
}

nb::object send_far(const Placement& self, nb::handle rank, nb::handle order) {
  const HostArray routes(order, "order", Use::kRead, 1);
  const uint32_t from = to_rank_of(self.layout(), rank);
  const std::span<const int32_t> numbers = routes.numbers<int32_t>();
  return ranges_to_tuple(without_gil([&] { return self.send_far(from, numbers); }));
}

nb::object return_far(const Placement& self, nb::handle rank) {
  const uint32_t from = to_rank_of(self.layout(), rank);
  return ranges_to_tuple(without_gil([&] { return self.return_far(from); }));
}

// [tokens, top_k, 2] of int32.
nb::object places(const Placement& self, nb::handle rank, nb::handle indices, nb::handle slots) {
  const HostArray routes(indices, "indices", Use::kRead, 2);
  const HostArray given(slots, "slots", Use::kRead, 2);
  given.require_size(0, routes.size(0), "tokens of indices");
  given.require_size(1, routes.size(1), "top_k of indices");
  const uint32_t origin = to_rank_of(self.layout(), rank);
  const std::span<const int32_t> counted = given.numbers<int32_t>();
  const bool wide = routes.is(nb::dtype<int64_t>());
  const auto find = [&] {
    return wide ? self.places(origin, std::span<const int64_t>(routes.numbers<int64_t>()), counted)
                : self.places(origin, std::span<const int32_t>(routes.numbers<int32_t>()), counted);
  };
  return pairs_to_numpy(without_gil(find)).attr("reshape")(routes.size(0), routes.size(1), 2);
}

nb::object sort_routes(nb::handle indices, nb::handle slots, nb::handle counts) {
  const HostArray routes(indices, "indices", Use::kRead, 2);
  const HostArray given(slots, "slots", Use::kRead, 2);
  const HostArray numbers(counts, "counts", Use::kRead, 1);
  given.require_size(0, routes.size(0), "tokens of indices");
  given.require_size(1, routes.size(1), "top_k of indices");
  const std::span<const int32_t> places = given.numbers<int32_t>();
  const std::span<const int32_t> counted = numbers.numbers<int32_t>();
  const bool wide = routes.is(nb::dtype<int64_t>());
  const auto sort = [&] {
    return wide ? moe::sort_routes(std::span<const int64_t>(routes.numbers<int64_t>()), places, counted)
                : moe::sort_routes(std::span<const int32_t>(routes.numbers<int32_t>()), places, counted);
  };
  return to_numpy(without_gil(sort));
}

void register_layout(nb::module_& part) {
  nb::class_<Layout>(part, "Layout")
      .def("__init__", &make_layout, nb::kw_only(), nb::arg("world"), nb::arg("experts"), nb::arg("top_k"),
           nb::arg("max_tokens"), nb::arg("dp_size") = 1, nb::arg("private_rows") = 0, nb::arg("padding") = 1,
           nb::arg("rows_per_expert") = 0, nb::arg("node_of_rank") = std::vector<uint32_t>{},
           nb::arg("experts_per_rank") = std::vector<uint32_t>{})
      .def_prop_ro("world", [](const Layout& self) { return self.shape().world; })
      .def_prop_ro("groups", &Layout::groups)
      .def_prop_ro("nodes", &Layout::nodes)
      .def(
          "rank_of_expert",
          [](const Layout& self, nb::handle expert) {
            return self.rank_of_expert(to_u32(expert, "expert", self.shape().experts - 1));
          },
          nb::arg("expert"))
      .def(
          "first_expert", [](const Layout& self, nb::handle rank) { return self.first_expert(to_rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "expert_count", [](const Layout& self, nb::handle rank) { return self.expert_count(to_rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "near_ranks", [](const Layout& self, nb::handle rank) { return self.near_ranks(to_rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "far_ranks_in_turn",
          [](const Layout& self, nb::handle rank) { return self.far_ranks_in_turn(to_rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "near",
          [](const Layout& self, nb::handle group, nb::handle rank) {
            return self.near(to_group(self, group), to_rank_of(self, rank));
          },
          nb::arg("group"), nb::arg("rank"))
      .def(
          "far_index",
          [](const Layout& self, nb::handle group, nb::handle rank) {
            return self.far_index(to_group(self, group), to_rank_of(self, rank));
          },
          nb::arg("group"), nb::arg("rank"), "Which of the slots for far rows of that rank is the group's.")
      .def(
          "far_groups", [](const Layout& self, nb::handle rank) { return self.far_groups(to_rank_of(self, rank)); },
          nb::arg("rank"));
}

void register_placement(nb::module_& part) {
  const auto rank_of = [](const Placement& self, nb::handle rank) { return to_rank_of(self.layout(), rank); };
  nb::class_<Placement>(part, "Placement")
      .def("__init__", &make_placement, nb::keep_alive<1, 2>(), nb::arg("layout"), nb::arg("counts"))
      .def(
          "routes",
          [](const Placement& self, nb::handle group, nb::handle rank) {
            return self.routes(to_group(self.layout(), group), to_rank_of(self.layout(), rank));
          },
          nb::arg("group"), nb::arg("rank"))
      .def(
          "expert_rows",
          [=](const Placement& self, nb::handle rank) { return to_numpy(self.expert_rows(rank_of(self, rank))); },
          nb::arg("rank"))
      .def(
          "expert_offsets",
          [=](const Placement& self, nb::handle rank) { return to_numpy(self.expert_offsets(rank_of(self, rank))); },
          nb::arg("rank"))
      .def(
          "rows_needed", [=](const Placement& self, nb::handle rank) { return self.rows_needed(rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "fullest_expert",
          [=](const Placement& self, nb::handle rank) { return self.fullest_expert(rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "far_rows_needed",
          [=](const Placement& self, nb::handle rank) { return self.far_rows_needed(rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "most_routes", [=](const Placement& self, nb::handle rank) { return self.most_routes(rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "first_over",
          [](const Placement& self, const std::vector<int64_t>& rows, const std::vector<int32_t>& routes,
             const std::vector<uint32_t>& left_out) { return self.first_over(rows, routes, left_out); },
          nb::arg("rows"), nb::arg("routes"), nb::arg("left_out"),
          nb::sig("def first_over(self, rows: collections.abc.Sequence[int], routes: collections.abc.Sequence[int], "
                  "left_out: collections.abc.Sequence[int]) -> "
                  "int | None"))
      .def(
          "routes_to", [=](const Placement& self, nb::handle rank) { return self.routes_to(rank_of(self, rank)); },
          nb::arg("rank"))
      .def(
          "route_starts",
          [](const Placement& self, nb::handle group) {
            return to_numpy(self.route_starts(to_group(self.layout(), group)));
          },
          nb::arg("group"))
      .def(
          "private_start",
          [](const Placement& self, nb::handle group, nb::handle rank) {
            return self.private_start(to_group(self.layout(), group), to_rank_of(self.layout(), rank));
          },
          nb::arg("group"), nb::arg("rank"))
      .def(
          "remainder_start",
          [](const Placement& self, nb::handle group, nb::handle rank) {
            return self.remainder_start(to_group(self.layout(), group), to_rank_of(self.layout(), rank));
          },
          nb::arg("group"), nb::arg("rank"))
      .def("pull_near", &pull_near, nb::arg("group"), nb::arg("rank"), nb::arg("order"))
      .def("pull_far", &pull_far, nb::arg("rank"))
      .def("send_far", &send_far, nb::arg("rank"), nb::arg("order"))
      .def("return_far", &return_far, nb::arg("rank"))
      .def("places", &places, nb::arg("rank"), nb::arg("indices"), nb::arg("slots"));
}

}  // namespace

void register_moe_layout(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe");
  register_layout(part);
  register_placement(part);
  part.def("sort_routes", &sort_routes, nb::arg("indices"), nb::arg("slots"), nb::arg("counts"));
  part.def(
      "split_evenly",
      [](nb::handle experts, nb::handle world) {
        const uint32_t number = to_u32(experts, "experts");
        const uint32_t ranks = to_u32(world, "world");
        if (number == 0 || ranks == 0) throw UsageError("experts and world must be 1 or more");
        return moe::split_evenly(number, ranks);
      },
      nb::arg("experts"), nb::arg("world"), "Experts of each rank, where nobody says how many.");
}

}  // namespace crossrail::bindings
