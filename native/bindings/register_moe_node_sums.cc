// crossrail._core.moe: partial sums of a node. See moe/node_sums.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/gil.h"
#include "bindings/host_arrays.h"
#include "moe/node_sums.h"

namespace crossrail::bindings {

namespace {

using moe::Layout;
using moe::Placement;
using Use = HostArray::Use;

uint32_t to_rank_of(const Layout& layout, nb::handle rank) { return to_u32(rank, "rank", layout.shape().world - 1); }

// where: int32 [tokens, top_k, 2]; weights: float32 [tokens, top_k].
nb::object to_arrays(moe::Terms terms, uint32_t top_k) {
  const size_t tokens = terms.weights.size() / top_k;
  return nb::make_tuple(pairs_to_numpy(std::move(terms.where)).attr("reshape")(tokens, top_k, 2),
                        to_numpy(std::move(terms.weights)).attr("reshape")(tokens, top_k));
}

nb::object node_tokens(const Layout& layout, nb::handle indices) {
  const HostArray routes(indices, "indices", Use::kRead, 2);
  routes.require_size(1, layout.shape().top_k, "top_k");
  const bool wide = routes.is(nb::dtype<int64_t>());
  return to_numpy(wide ? moe::node_tokens(layout, std::span<const int64_t>(routes.numbers<int64_t>()))
                       : moe::node_tokens(layout, std::span<const int32_t>(routes.numbers<int32_t>())));
}

nb::object terms_to_send(const Placement& placement, nb::handle rank, nb::handle origin,
                         const nb::typed<nb::sequence, nb::object>& tags) {
  const uint32_t from = to_rank_of(placement.layout(), rank);
  const uint32_t to = to_rank_of(placement.layout(), origin);
  std::vector<HostArray> held;
  std::vector<std::span<const moe::Tag>> given;
  for (const nb::handle one : tags) {
    const HostArray& array = held.emplace_back(one, "tags", Use::kRead, 2);
    array.require_size(1, 2, "route and weight");
    given.emplace_back(reinterpret_cast<const moe::Tag*>(array.numbers<int32_t>().data()), array.size(0));
  }
  moe::Terms terms;
  {
    const WithoutGil no_gil;
    terms = moe::terms_to_send(placement, from, to, given);
  }
  return to_arrays(std::move(terms), placement.layout().shape().top_k);
}

nb::object terms_to_take(const Placement& placement, nb::handle origin, nb::handle indices, nb::handle slots,
                         nb::handle weights) {
  const HostArray routes(indices, "indices", Use::kRead, 2);
  const HostArray given(slots, "slots", Use::kRead, 2);
  const HostArray factors(weights, "weights", Use::kRead, 2);
  routes.require_size(1, placement.layout().shape().top_k, "top_k");
  const uint32_t to = to_rank_of(placement.layout(), origin);
  const std::span<const int32_t> counted = given.numbers<int32_t>();
  const std::span<const float> weighed = factors.numbers<float>();
  const bool wide = routes.is(nb::dtype<int64_t>());
  moe::Terms terms;
  {
    const WithoutGil no_gil;
    terms =
        wide ? moe::terms_to_take(placement, to, std::span<const int64_t>(routes.numbers<int64_t>()), counted, weighed)
             : moe::terms_to_take(placement, to, std::span<const int32_t>(routes.numbers<int32_t>()), counted, weighed);
  }
  return to_arrays(std::move(terms), placement.layout().shape().top_k);
}

}  // namespace

void register_moe_node_sums(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe");
  part.def(
      "partners",
      [](const Layout& layout, nb::handle origin) { return moe::partners(layout, to_rank_of(layout, origin)); },
      nb::arg("layout"), nb::arg("origin"));
  part.def(
      "origins", [](const Layout& layout, nb::handle rank) { return moe::origins(layout, to_rank_of(layout, rank)); },
      nb::arg("layout"), nb::arg("rank"));
  part.def(
      "far_node",
      [](const Layout& layout, nb::handle origin, nb::handle partner) {
        return moe::far_node(layout, to_rank_of(layout, origin), to_rank_of(layout, partner));
      },
      nb::arg("layout"), nb::arg("origin"), nb::arg("partner"));
  part.def("node_tokens", &node_tokens, nb::arg("layout"), nb::arg("indices"),
           nb::sig("def node_tokens(layout: Layout, indices: typing.Any) -> typing.Any"));
  part.def("terms_to_send", &terms_to_send, nb::arg("placement"), nb::arg("rank"), nb::arg("origin"), nb::arg("tags"),
           nb::sig("def terms_to_send(placement: Placement, rank: int, origin: int, tags: "
                   "collections.abc.Sequence[typing.Any]) -> tuple[typing.Any, typing.Any]"));
  part.def(
      "terms_to_take", &terms_to_take, nb::arg("placement"), nb::arg("origin"), nb::arg("indices"), nb::arg("slots"),
      nb::arg("weights"),
      nb::sig("def terms_to_take(placement: Placement, origin: int, indices: typing.Any, slots: typing.Any, weights: "
              "typing.Any) -> tuple[typing.Any, typing.Any]"));
}

}  // namespace crossrail::bindings
