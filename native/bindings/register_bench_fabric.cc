// crossrail._core.bench: bare libfabric and bare libibverbs, as limits (bench/bare_loop.h).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <tuple>

#include "bench/bare_loop.h"
#include "bindings/bench_arguments.h"
#include "bindings/bindings.h"

using namespace nanobind::literals;

namespace crossrail::bindings {
namespace {

using bench::BareLoop;
using TargetWords = std::tuple<uint64_t, uint64_t>;  // base, key

std::vector<uint8_t> copied(const nb::bytes& bytes) {
  const auto span = as_span(bytes);
  return {span.begin(), span.end()};
}

BareLoop::Target target_of(const TargetWords& words) { return {std::get<0>(words), std::get<1>(words)}; }

int64_t writes(BareLoop& loop, const Memory& source, const TargetWords& target, uint64_t nbytes, uint64_t count,
               uint32_t window, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("bare NIC writes", timeout_s);
  return loop.writes(as_span(source), target_of(target), nbytes, count, window, guard);
}

int64_t pages(BareLoop& loop, const Memory& source, const TargetWords& target, const Indices& src_pages,
              const Indices& dst_pages, uint64_t page_bytes, uint32_t window, bool imm_each, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("bare NIC pages", timeout_s);
  return loop.pages(as_span(source), target_of(target), as_span(src_pages), as_span(dst_pages), page_bytes, window,
                    imm_each, guard);
}

int64_t ping_pong(BareLoop& loop, const Memory& source, const TargetWords& target, uint64_t rounds, bool first,
                  double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("bare NIC ping-pong", timeout_s);
  return loop.ping_pong(as_span(source), target_of(target), rounds, first, guard);
}

void receive(BareLoop& loop, uint64_t count, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("bare NIC receiver", timeout_s);
  loop.receive(count, guard);
}

TargetWords add_memory(BareLoop& loop, const Memory& memory) {
  const BareLoop::Target target = loop.add_memory(as_span(memory));
  return {target.base, target.key};
}

}  // namespace

void register_bench_fabric(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<BareLoop>(module, "BareLoop")
      .def_prop_ro("name", [](const BareLoop& loop) { return nb::bytes(loop.name().data(), loop.name().size()); })
      .def("add_memory", &add_memory, "memory"_a, "It must stay as long as this does. Returns base and key.")
      .def(
          "meet", [](BareLoop& loop, const nb::bytes& name) { loop.meet(copied(name)); }, "name"_a)
      .def("writes", &writes, "source"_a, "target"_a, nb::kw_only(), "nbytes"_a, "count"_a, "window"_a,
           "timeout_s"_a = 60.0)
      .def("pages", &pages, "source"_a, "target"_a, "src_pages"_a, "dst_pages"_a, nb::kw_only(), "page_bytes"_a,
           "window"_a, "imm_each"_a = true, "timeout_s"_a = 60.0)
      .def("ping_pong", &ping_pong, "source"_a, "target"_a, nb::kw_only(), "rounds"_a, "first"_a, "timeout_s"_a = 60.0)
      .def("receive", &receive, "count"_a, nb::kw_only(), "timeout_s"_a = 60.0)
      .def("progress", &BareLoop::progress, release());
  module.def("fabric_loop", &bench::open_fabric_loop, "provider"_a, "rail"_a, release());
  module.def("verbs_loop", &bench::open_verbs_loop, release());
}

}  // namespace crossrail::bindings
