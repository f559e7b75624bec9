// crossrail._core.moe: kernels of dispatch and combine, on rows in host memory. crossrail.moe.kernels says what they
// do.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/gil.h"
#include "bindings/host_arrays.h"
#include "moe/rows.h"
#include "moe/simd/row_ops.h"
#include "moe/sums.h"
#include "util/anonymous_pages.h"
#include "util/errors.h"

namespace crossrail::bindings {

namespace {

using Use = HostArray::Use;

std::vector<std::string> levels() {
  std::vector<std::string> names;
  for (const moe::RowOps* ops : moe::row_ops_here()) names.emplace_back(ops->name);
  return names;
}

nb::object sparse_pages(nb::handle nbytes, bool dense) {
  const uint64_t length = to_u64(nbytes, "nbytes");
  auto* pages = new AnonymousPages(AnonymousPages::sparse(length, dense));
  const nb::capsule owner(pages, [](void* kept) noexcept { delete static_cast<AnonymousPages*>(kept); });
  auto* data = reinterpret_cast<uint8_t*>(pages->base());
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {length}, owner));
}

// None, or an array.
std::optional<HostArray> maybe(nb::handle given, const char* argument, Use use, size_t dimensions) {
  if (given.is_none()) return {};
  return std::optional<HostArray>(std::in_place, given, argument, use, dimensions);
}

void count(nb::handle indices, nb::handle experts, nb::handle counts, nb::handle slots) {
  const HostArray from(indices, "indices", Use::kRead, 2);
  const HostArray numbers(counts, "counts", Use::kWrite, 1);
  const HostArray places(slots, "slots", Use::kWrite, 2);
  numbers.require_size(0, to_u32(experts, "experts"), "experts");
  places.require_size(0, from.size(0), "tokens of indices");
  places.require_size(1, from.size(1), "top_k of indices");
  const auto top_k = static_cast<uint32_t>(from.size(1));
  const std::span<int32_t> counted = numbers.numbers<int32_t>();
  const std::span<int32_t> placed = places.numbers<int32_t>();
  const WithoutGil no_gil;
  if (from.is(nb::dtype<int64_t>())) {
    moe::count_routes(std::span<const int64_t>(from.numbers<int64_t>()), top_k, counted, placed);
  } else {
    moe::count_routes(std::span<const int32_t>(from.numbers<int32_t>()), top_k, counted, placed);
  }
}

uint64_t hash_routes(nb::handle indices) {
  const HostArray from(indices, "indices", Use::kRead, 2);
  const auto top_k = static_cast<uint32_t>(from.size(1));
  const WithoutGil no_gil;
  if (from.is(nb::dtype<int64_t>())) return moe::hash_routes(std::span<const int64_t>(from.numbers<int64_t>()), top_k);
  return moe::hash_routes(std::span<const int32_t>(from.numbers<int32_t>()), top_k);
}

void pack(nb::handle target, nb::handle x, nb::handle scales, nb::handle table) {
  const HostArray to(target, "target", Use::kWrite, 2);
  const HostArray from(x, "x", Use::kRead, 2);
  const std::optional<HostArray> with = maybe(scales, "scales", Use::kRead, 2);
  const std::optional<HostArray> rows = maybe(table, "table", Use::kRead, 1);
  if (with) with->require_size(0, from.size(0), "rows of x");
  std::span<const int32_t> chosen;
  if (rows) chosen = rows->numbers<int32_t>();
  const WithoutGil no_gil;
  moe::pack_rows(to.rows_out(), from.rows_in(), with ? with->rows_in() : moe::RowsIn{}, rows ? &chosen : nullptr);
}

void pull(nb::handle x, nb::handle scales, nb::handle source, nb::handle table) {
  const HostArray to(x, "x", Use::kWrite, 2);
  const std::optional<HostArray> with = maybe(scales, "scales", Use::kWrite, 2);
  const HostArray from(source, "source", Use::kRead, 2);
  const HostArray moves(table, "table", Use::kRead, 2);
  if (with) with->require_size(0, to.size(0), "rows of x");
  moves.require_size(1, 2, "source row and output row");
  const auto* pairs = reinterpret_cast<const moe::Move*>(moves.numbers<int32_t>().data());
  const WithoutGil no_gil;
  moe::pull_rows(to.rows_out(), with ? with->rows_out() : moe::RowsOut{}, from.rows_in(), {pairs, moves.size(0)});
}

void reduce(const moe::RowOps& ops, nb::handle out, const nb::typed<nb::sequence, nb::object>& sources,
            nb::handle where, nb::handle weights, bool accumulate) {
  const HostArray sums(out, "out", Use::kWrite, 2);
  const HostArray places(where, "where", Use::kRead, 3);
  const std::optional<HostArray> factors = maybe(weights, "weights", Use::kRead, 2);
  places.require_size(0, sums.size(0), "rows of out");
  places.require_size(2, 2, "source and row");
  moe::Reduction reduction{sums.data(), sums.number_format(), sums.size(0), sums.size(1), places.size(1)};
  reduction.format = reduction.out_format;
  std::vector<HostArray> held;
  std::vector<moe::NumberRows> rows;
  for (const nb::handle source : sources) {
    const HostArray& array = held.emplace_back(source, "sources", Use::kRead, 2);
    array.require_size(1, sums.size(1), "columns of out");
    if (held.size() > 1 && array.number_format() != reduction.format) {
      throw UsageError("sources are of different types, must be of one");
    }
    reduction.format = array.number_format();
    rows.push_back({array.data(), array.size(0)});
  }
  reduction.sources = rows;
  reduction.where = {reinterpret_cast<const moe::Place*>(places.numbers<int32_t>().data()),
                     places.size(0) * places.size(1)};
  if (factors) {
    factors->require_size(0, sums.size(0), "rows of out");
    factors->require_size(1, places.size(1), "top_k of where");
    reduction.weights = factors->numbers<float>();
  }
  reduction.accumulate = accumulate;
  const WithoutGil no_gil;
  moe::reduce_rows(ops, reduction);
}

size_t check_block(nb::handle block) {
  const uint64_t value = to_u64(block, "block", uint64_t{1} << 32U);
  if (value == 0) throw UsageError("block is 0, must be 1 or more");
  return value;
}

// codes and scales as taken by quantize and dequantize.
void check_codes(const HostArray& codes, const HostArray& scales, const HostArray& x, size_t block) {
  codes.require_size(0, x.size(0), "rows of x");
  codes.require_size(1, x.size(1), "columns of x");
  scales.require_size(0, x.size(0), "rows of x");
  scales.require_size(1, (x.size(1) + block - 1) / block, "blocks of a row");
}

void quantize(const moe::RowOps& ops, nb::handle codes, nb::handle scales, nb::handle x, nb::handle block) {
  const HostArray to(codes, "codes", Use::kWrite, 2);
  const HostArray with(scales, "scales", Use::kWrite, 2);
  const HostArray from(x, "x", Use::kRead, 2);
  const size_t length = check_block(block);
  check_codes(to, with, from, length);
  uint8_t* bytes = to.numbers<uint8_t>().data();
  float* factors = with.numbers<float>().data();
  const moe::Float format = from.number_format();
  const WithoutGil no_gil;
  moe::quantize_rows(ops, bytes, factors, from.data(), format, from.size(0), from.size(1), length);
}

void dequantize(nb::handle out, nb::handle codes, nb::handle scales, nb::handle block) {
  const HostArray to(out, "out", Use::kWrite, 2);
  const HostArray from(codes, "codes", Use::kRead, 2);
  const HostArray with(scales, "scales", Use::kRead, 2);
  const size_t length = check_block(block);
  check_codes(from, with, to, length);
  const uint8_t* bytes = from.numbers<uint8_t>().data();
  const float* factors = with.numbers<float>().data();
  const moe::Float format = to.number_format();
  const WithoutGil no_gil;
  moe::dequantize_rows(to.data(), format, bytes, factors, to.size(0), to.size(1), length);
}

}  // namespace

void register_moe_kernels(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe", "Kernels, places and host proxy of crossrail.moe, which is the API.");
  part.def("sparse_pages", &sparse_pages, nb::arg("nbytes"), nb::arg("is_dense"),
           "Memory of this process alone, uint8 [nbytes], resident as far as it is used; huge pages where that is in "
           "one piece.");
  part.def("levels", &levels, "Instruction sets that Kernels takes here, the fastest first.");
  nb::class_<moe::RowOps>(part, "Kernels")
      .def(
          "__init__",
          [](moe::RowOps* self, const std::string& level) {
            new (self) moe::RowOps(moe::choose_row_ops(level.c_str()));
          },
          nb::arg("level") = "auto")
      .def_prop_ro("level", [](const moe::RowOps& self) { return std::string(self.name); })
      .def("reduce", &reduce, nb::arg("out"), nb::arg("sources"), nb::arg("where"), nb::arg("weights").none(),
           nb::arg("accumulate"))
      .def("quantize", &quantize, nb::arg("codes"), nb::arg("scales"), nb::arg("x"), nb::arg("block"));
  part.def("count", &count, nb::arg("indices"), nb::arg("experts"), nb::arg("counts"), nb::arg("slots"));
  part.def("hash_routes", &hash_routes, nb::arg("indices"), "Of which token goes to which experts, in any order.");
  part.def("pack", &pack, nb::arg("target"), nb::arg("x"), nb::arg("scales").none(), nb::arg("table").none());
  part.def("pull", &pull, nb::arg("x"), nb::arg("scales").none(), nb::arg("source"), nb::arg("table"));
  part.def("dequantize", &dequantize, nb::arg("out"), nb::arg("codes"), nb::arg("scales"), nb::arg("block"));
}

}  // namespace crossrail::bindings
