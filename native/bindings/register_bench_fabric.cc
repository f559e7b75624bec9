// crossrail._core.bench: the limit that is bare libfabric (bench/fabric_loop.h).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "bench/fabric_loop.h"
#include "bindings/bench_arguments.h"
#include "bindings/bindings.h"

using namespace nanobind::literals;

namespace crossrail::bindings {
namespace {

using bench::FabricLoop;
using TargetWords = std::tuple<uint64_t, uint64_t>;  // base, key

std::vector<uint8_t> copied(const nb::bytes& bytes) {
  const auto span = as_span(bytes);
  return {span.begin(), span.end()};
}

FabricLoop::Target target_of(const TargetWords& words) { return {std::get<0>(words), std::get<1>(words)}; }

int64_t writes(FabricLoop& loop, const Memory& source, const TargetWords& target, uint64_t nbytes, uint64_t count,
               uint32_t window, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("bare libfabric writes", timeout_s);
  return loop.writes(as_span(source), target_of(target), nbytes, count, window, guard);
}

int64_t pages(FabricLoop& loop, const Memory& source, const TargetWords& target, const Indices& src_pages,
              const Indices& dst_pages, uint64_t page_bytes, uint32_t window, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("bare libfabric pages", timeout_s);
  return loop.pages(as_span(source), target_of(target), as_span(src_pages), as_span(dst_pages), page_bytes, window,
                    guard);
}

void receive(FabricLoop& loop, uint64_t count, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("bare libfabric receiver", timeout_s);
  loop.receive(count, guard);
}

TargetWords add_memory(FabricLoop& loop, const Memory& memory) {
  const FabricLoop::Target target = loop.add_memory(as_span(memory));
  return {target.base, target.key};
}

}  // namespace

void register_bench_fabric(nb::module_& module) {
  nb::class_<FabricLoop>(module, "FabricLoop")
      .def(nb::init<const std::string&, const std::string&>(), "provider"_a, "rail"_a)
      .def_prop_ro("name", [](const FabricLoop& loop) { return nb::bytes(loop.name().data(), loop.name().size()); })
      .def("add_memory", &add_memory, "memory"_a, "It must stay as long as this does. Returns base and key.")
      .def(
          "meet", [](FabricLoop& loop, const nb::bytes& name) { loop.meet(copied(name)); }, "name"_a)
      .def("writes", &writes, "source"_a, "target"_a, nb::kw_only(), "nbytes"_a, "count"_a, "window"_a,
           "timeout_s"_a = 60.0)
      .def("pages", &pages, "source"_a, "target"_a, "src_pages"_a, "dst_pages"_a, nb::kw_only(), "page_bytes"_a,
           "window"_a, "timeout_s"_a = 60.0)
      .def("receive", &receive, "count"_a, nb::kw_only(), "timeout_s"_a = 60.0);
}

}  // namespace crossrail::bindings
