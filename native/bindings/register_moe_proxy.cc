// crossrail._core.moe: rows for ranks that share no memory with us. See moe/proxy.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"
#include "bindings/host_arrays.h"
#include "bindings/moe_proxy.h"

namespace crossrail::bindings {

namespace {

using moe::FarStep;
using moe::Layout;
using moe::Placement;

void make_far_memory(moe::FarMemory* self, uint64_t routes_in, uint64_t routes_out, uint64_t routes_parity_bytes,
                     uint64_t rows_in, uint64_t results_in, uint64_t rows_out, uint64_t results_out,
                     uint64_t rows_parity_bytes, uint64_t route_bytes, uint64_t stride_bytes, uint64_t y_bytes) {
  new (self) moe::FarMemory{.routes_in = routes_in,
                            .routes_out = routes_out,
                            .routes_parity_bytes = routes_parity_bytes,
                            .rows_in = rows_in,
                            .results_in = results_in,
                            .rows_out = rows_out,
                            .results_out = results_out,
                            .rows_parity_bytes = rows_parity_bytes,
                            .route_bytes = route_bytes,
                            .stride_bytes = stride_bytes,
                            .y_bytes = y_bytes};
}

FarStep to_step(const std::string& name) {
  if (name == "routes") return FarStep::kRoutes;
  if (name == "rows") return FarStep::kRows;
  if (name == "results") return FarStep::kResults;
  if (name == "farewell") return FarStep::kFarewell;
  throw UsageError("step is '" + name + "', must be one of routes, rows, results, farewell");
}

void send_routes(ProxyHandle& self, uint32_t round, nb::handle counts, uint64_t hash) {
  const HostArray given(counts, "counts", HostArray::Use::kRead, 1);
  const std::span<const int32_t> numbers = given.numbers<int32_t>();
  self.post([&](auto& to) { to.send_routes(round, numbers, hash); });
}

nb::object routes_of(const ProxyHandle& self, uint32_t round, uint32_t rank) {
  const std::span<const int32_t> routes = self.get().routes_of(round, rank);
  return to_numpy(std::vector<int32_t>(routes.begin(), routes.end()));
}

}  // namespace

void register_moe_proxy(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe");
  part.attr("FAREWELL_BYTES") = moe::kFarewellBytes;
  part.attr("FAREWELL_WORDS") = moe::kFarewellWords;
  nb::class_<moe::FarMemory>(part, "FarMemory", nb::is_final(),
                             "Where the parts of a Proxy's two regions are: see moe/proxy.h.")
      .def("__init__", &make_far_memory, nb::kw_only(), nb::arg("routes_in"), nb::arg("routes_out"),
           nb::arg("routes_parity_bytes"), nb::arg("rows_in"), nb::arg("results_in"), nb::arg("rows_out"),
           nb::arg("results_out"), nb::arg("rows_parity_bytes"), nb::arg("route_bytes"), nb::arg("stride_bytes"),
           nb::arg("y_bytes"));
  nb::class_<ProxyHandle>(part, "Proxy", nb::is_final(), nb::type_slots(engine_slots<ProxyHandle>))
      .def(nb::init<nb::pointer_and_handle<EngineHandle>, const Layout&, uint32_t, const moe::FarMemory&,
                    const RegionHandle&, const RegionHandle&, bool>(),
           nb::keep_alive<1, 3>(), nb::arg("engine"), nb::arg("layout"), nb::arg("rank"), nb::arg("memory"),
           nb::arg("routes"), nb::arg("rows"), nb::arg("masks") = false,
           nb::sig("def __init__(self, engine: crossrail._core.Engine, layout: Layout, rank: int, memory: "
                   "FarMemory, routes: crossrail._core.Region, rows: crossrail._core.Region, masks: bool = False) -> "
                   "None"))
      .def("far_ranks", [](const ProxyHandle& self) { return self.get().far_ranks(); })
      .def(
          "imms_for", [](const ProxyHandle& self, uint32_t rank) { return self.get().imms_for(rank); }, nb::arg("rank"))
      .def("connect", &ProxyHandle::connect, nb::arg("rank"), nb::arg("routes"), nb::arg("rows"), nb::arg("imms"),
           nb::sig("def connect(self, rank: int, routes: crossrail._core.RegionDescriptor, rows: "
                   "crossrail._core.RegionDescriptor, imms: collections.abc.Sequence[int]) -> None"))
      .def(
          "watch", &ProxyHandle::watch, nb::arg("near"), nb::arg("rank"), nb::arg("board"), nb::arg("results"),
          nb::sig("def watch(self, near: crossrail._core.Address, rank: int, board: memoryview, results: int) -> None"),
          "A rank with a board here: its word 0 is its farewell, the two from `results` on are those of results.")
      .def(
          "reach", [](const ProxyHandle& self, uint32_t rank) { self.get().reach(rank); }, nb::arg("rank"),
          "From now on whoever packs rows for that far rank writes them there by himself.")
      .def(
          "hear", [](const ProxyHandle& self, uint32_t rank) { self.get().hear(rank); }, nb::arg("rank"),
          "That rank does so here, and signals it.")
      .def(
          "leave_out",
          [](const ProxyHandle& self, uint32_t rank, nb::handle timeout_s) {
            return self.wait(timeout_s, [rank](moe::Proxy& proxy, Deadline) {
              proxy.leave_out(rank);
              return moe::FarOutcome{};
            });
          },
          nb::arg("rank"), nb::arg("timeout_s").none(),
          nb::sig("def leave_out(self, rank: int, timeout_s: float | None) -> tuple[str, int, str]"),
          "Goes on without that rank. 'late': the thread that posts was not through; nothing has changed.")
      .def(
          "has_come",
          [](const ProxyHandle& self, const std::string& step, uint32_t round, uint32_t rank, nb::handle timeout_s) {
            bool has_come = false;
            const FarStep awaited = to_step(step);
            const nb::tuple told = self.wait(timeout_s, [&](moe::Proxy& proxy, Deadline) {
              has_come = proxy.has_come_from(awaited, round, rank);
              return moe::FarOutcome{};
            });
            return nb::cast<std::string>(told[0]) == "ready" && has_come;
          },
          nb::arg("step"), nb::arg("round"), nb::arg("rank"), nb::arg("timeout_s").none(),
          nb::sig("def has_come(self, step: str, round: int, rank: int, timeout_s: float | None) -> bool"),
          "Whether all of that step of the round last opened of its parity has come from a far rank.")
      .def("start_thread", &ProxyHandle::start_thread, nb::arg("cpu").none(),
           nb::sig("def start_thread(self, cpu: int | None) -> None"),
           "From now on a thread posts, on that core or wherever this process may run.")
      .def("stop_thread", &ProxyHandle::stop_thread, "Ends it, once it has posted what it was told to. Idempotent.")
      .def("send_routes", &send_routes, nb::arg("round"), nb::arg("counts"), nb::arg("hash") = 0)
      .def(
          "send_rows", [](ProxyHandle& self, uint32_t round) { self.post([&](auto& to) { to.send_rows(round); }); },
          nb::arg("round"))
      .def("routes_of", &routes_of, nb::arg("round"), nb::arg("rank"))
      .def(
          "hash_of",
          [](const ProxyHandle& self, uint32_t round, uint32_t rank) { return self.get().hash_of(round, rank); },
          nb::arg("round"), nb::arg("rank"))
      .def(
          "send_remainder",
          [](ProxyHandle& self, uint32_t round, nb::handle placement) { self.post_placed(round, placement, false); },
          nb::arg("round"), nb::arg("placement").none(),
          nb::sig("def send_remainder(self, round: int, placement: Placement | None) -> None"))
      .def(
          "send_results",
          [](ProxyHandle& self, uint32_t round, nb::handle placement) { self.post_placed(round, placement, true); },
          nb::arg("round"), nb::arg("placement").none(),
          nb::sig("def send_results(self, round: int, placement: Placement | None) -> None"))
      .def(
          "take_sums", [](ProxyHandle& self, uint32_t round) { self.post([&](auto& to) { to.take_sums(round); }); },
          nb::arg("round"), "Results are those of our partners from here on.")
      .def(
          "send_sums",
          [](ProxyHandle& self, uint32_t round, uint32_t origin, uint64_t first_row, uint64_t rows) {
            self.post([&](auto& to) { to.send_sums(round, origin, first_row, rows); });
          },
          nb::arg("round"), nb::arg("origin"), nb::arg("first_row"), nb::arg("rows"))
      .def(
          "say_farewell",
          [](const ProxyHandle& self, std::optional<uint32_t> number, nb::bytes words, double timeout_s) {
            const moe::Reason why{number, {words.c_str(), words.size()}};
            return self.wait(nb::float_(timeout_s), [&why](moe::Proxy& proxy, Deadline deadline) {
              return proxy.say_farewell(why, deadline, interrupted);
            });
          },
          nb::arg("number").none(), nb::arg("words"), nb::arg("timeout_s"),
          "number, words: why, for those who are told; words are cut to FAREWELL_WORDS bytes.",
          nb::sig("def say_farewell(self, number: int | None, words: bytes, timeout_s: float) -> "
                  "tuple[str, int, str]"))
      .def(
          "why_left",
          [](const ProxyHandle& self, uint32_t rank) {
            const moe::Reason why = self.get().why_left(rank);
            return nb::make_tuple(why.number, nb::bytes(why.words.data(), why.words.size()));
          },
          nb::arg("rank"), nb::sig("def why_left(self, rank: int) -> tuple[int | None, bytes]"),
          "What a far rank that has said farewell gave with it; written by that rank.")
      .def(
          "wait",
          [](const ProxyHandle& self, const std::string& step, uint32_t round, nb::handle timeout_s) {
            const FarStep awaited = to_step(step);
            return self.wait(timeout_s, [&](moe::Proxy& proxy, Deadline deadline) {
              return proxy.wait(awaited, round, deadline, interrupted);
            });
          },
          nb::arg("step"), nb::arg("round"), nb::arg("timeout_s").none(),
          nb::sig("def wait(self, step: str, round: int, timeout_s: float | None) -> tuple[str, int, str]"),
          "'late', and our own rank: the thread that posts has not done so; so with the other waits.")
      .def(
          "wait_sent",
          [](const ProxyHandle& self, uint32_t round, nb::handle timeout_s) {
            return self.wait(timeout_s, [&](moe::Proxy& proxy, Deadline deadline) {
              return proxy.wait_sent(round, deadline, interrupted);
            });
          },
          nb::arg("round"), nb::arg("timeout_s").none(),
          nb::sig("def wait_sent(self, round: int, timeout_s: float | None) -> tuple[str, int, str]"));
}

}  // namespace crossrail::bindings
