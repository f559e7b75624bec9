// crossrail._core.moe: rows for ranks that share no memory with us. See moe/proxy.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"
#include "bindings/moe_arrays.h"
#include "moe/proxy.h"
#include "moe/proxy_thread.h"

namespace crossrail::bindings {

namespace {

using moe::FarResult;
using moe::FarStep;
using moe::Layout;
using moe::Placement;

const char* result_name(FarResult result) {
  switch (result) {
    case FarResult::kReady:
      return "ready";
    case FarResult::kLate:
      return "late";
    case FarResult::kPeerLost:
      return "peer-lost";
    case FarResult::kLeft:
      return "left";
    case FarResult::kMaskedOut:
      return "masked-out";
    case FarResult::kFailed:
      return "failed";
    case FarResult::kClosed:
      return "engine-closed";
    case FarResult::kInterrupted:
      return "interrupted";
  }
  return "";
}

class ProxyHandle {
 public:
  ProxyHandle(nb::pointer_and_handle<EngineHandle> given, const Layout& layout, uint32_t rank,
              const std::array<uint64_t, 11>& memory, const RegionHandle& routes, const RegionHandle& rows, bool masks)
      : engine(nb::borrow(given.h)), engine_(given.p) {
    const auto& [routes_in, routes_out, routes_parity, rows_in, results_in, rows_out, results_out, rows_parity, route,
                 stride, y] = memory;
    const moe::FarMemory parts{.routes_in = routes_in,
                               .routes_out = routes_out,
                               .routes_parity_bytes = routes_parity,
                               .rows_in = rows_in,
                               .results_in = results_in,
                               .rows_out = rows_out,
                               .results_out = results_out,
                               .rows_parity_bytes = rows_parity,
                               .route_bytes = route,
                               .stride_bytes = stride,
                               .y_bytes = y};
    const moe::FarRegions<RegionRef> regions{routes.core(), rows.core()};
    proxy_ = std::make_unique<moe::Proxy>(given.p->core(), layout, rank, parts, regions, masks);
  }
  ~ProxyHandle() {
    if (generation_ == fork_generation) return;  // what there is to end is the parent's
    thread_.release();
    proxy_.release();
  }
  ProxyHandle(const ProxyHandle&) = delete;
  ProxyHandle& operator=(const ProxyHandle&) = delete;

  moe::Proxy& get() const {
    if (generation_ != fork_generation) throw_forked();
    return *proxy_;
  }

  void start_thread(nb::handle cpu) {
    const EngineOptions& options = engine_->core()->options();
    if (options.stage != nullptr) throw UsageError("proxy is 'thread', and simulated engines have no threads");
    const int32_t number = cpu.is_none() ? -1 : static_cast<int32_t>(to_u32(cpu, "proxy_cpu", INT32_MAX));
    thread_ = std::make_unique<moe::ProxyThread>(get(), number, options.spin_ns);
  }
  void stop_thread() {
    get();
    const WithoutGil no_gil;
    thread_.reset();
  }
  // By the thread, if there is one.
  template <typename Post>
  void post(Post post) {
    moe::Proxy& proxy = get();
    const WithoutGil no_gil;
    thread_ ? post(*thread_) : post(proxy);
  }
  void post_placed(uint32_t round, nb::handle placement, bool is_results) {
    const Placement* const places = placement.is_none() ? nullptr : nb::cast<const Placement*>(placement);
    // Until that round's memory is used again, which takes a wait: by then the thread is done with it.
    if (places != nullptr) placements_[round % moe::kParities] = nb::borrow(placement);
    post([&](auto& to) { is_results ? to.send_results(round, places) : to.send_remainder(round, places); });
  }
  void connect(uint32_t rank, DescriptorHandle& routes, DescriptorHandle& rows, const std::vector<uint32_t>& imms) {
    get().connect(rank, {engine_->remote(routes), engine_->remote(rows)}, imms);
  }
  void watch(nb::handle address, uint32_t rank, nb::handle board) {
    BufferView& view = boards_.emplace_back();
    if (!view.acquire(board, PyBUF_SIMPLE) || static_cast<size_t>(view.get().len) < sizeof(moe::Word))
      throw UsageError("a board has no room for words");
    get().watch(engine_->peer(address), rank, *static_cast<const moe::Word*>(view.get().buf));
  }

  template <typename Wait>
  nb::tuple wait(nb::handle timeout_s, Wait wait) const {
    moe::Proxy& proxy = get();
    const Deadline deadline = to_deadline(timeout_s, engine_->core()->clock());
    moe::FarOutcome outcome{};
    wait_without_gil([&] {
      const bool is_ours = !thread_ || thread_->settle(deadline);
      outcome = is_ours ? wait(proxy, deadline) : moe::FarOutcome{FarResult::kLate, proxy.far_ranks().front(), {}};
      return outcome.result == FarResult::kInterrupted ? WaitResult::kInterrupted : WaitResult::kReady;
    });
    return nb::make_tuple(result_name(outcome.result), outcome.rank, to_text(outcome.detail));
  }

  nb::object engine;

 private:
  EngineHandle* const engine_;
  std::deque<BufferView> boards_;  // of those that are watched
  std::unique_ptr<moe::Proxy> proxy_;
  std::unique_ptr<moe::ProxyThread> thread_;  // ends before the proxy
  std::array<nb::object, moe::kParities> placements_;
  const uint32_t generation_ = fork_generation;
};

FarStep to_step(const std::string& name) {
  if (name == "routes") return FarStep::kRoutes;
  if (name == "rows") return FarStep::kRows;
  if (name == "results") return FarStep::kResults;
  if (name == "farewell") return FarStep::kFarewell;
  throw UsageError("step is '" + name + "', must be one of routes, rows, results, farewell");
}

void send_routes(ProxyHandle& self, uint32_t round, nb::handle counts) {
  const MoeArray given(counts, "counts", MoeArray::Use::kRead, 1);
  const std::span<const int32_t> numbers = given.numbers<int32_t>();
  self.post([&](auto& to) { to.send_routes(round, numbers); });
}

nb::object routes_of(const ProxyHandle& self, uint32_t round, uint32_t rank) {
  const std::span<const int32_t> routes = self.get().routes_of(round, rank);
  return to_numpy(std::vector<int32_t>(routes.begin(), routes.end()));
}

}  // namespace

void register_moe_proxy(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe");
  nb::class_<ProxyHandle>(part, "Proxy", nb::is_final(), nb::type_slots(engine_slots<ProxyHandle>))
      .def(nb::init<nb::pointer_and_handle<EngineHandle>, const Layout&, uint32_t, const std::array<uint64_t, 11>&,
                    const RegionHandle&, const RegionHandle&, bool>(),
           nb::keep_alive<1, 3>(), nb::arg("engine"), nb::arg("layout"), nb::arg("rank"), nb::arg("memory"),
           nb::arg("routes"), nb::arg("rows"), nb::arg("masks") = false,
           nb::sig("def __init__(self, engine: crossrail._core.Engine, layout: Layout, rank: int, memory: "
                   "collections.abc.Sequence[int], routes: crossrail._core.Region, rows: crossrail._core.Region, "
                   "masks: bool = False) -> None"))
      .def("far_ranks", [](const ProxyHandle& self) { return self.get().far_ranks(); })
      .def(
          "imms_for", [](const ProxyHandle& self, uint32_t rank) { return self.get().imms_for(rank); }, nb::arg("rank"))
      .def("connect", &ProxyHandle::connect, nb::arg("rank"), nb::arg("routes"), nb::arg("rows"), nb::arg("imms"),
           nb::sig("def connect(self, rank: int, routes: crossrail._core.RegionDescriptor, rows: "
                   "crossrail._core.RegionDescriptor, imms: collections.abc.Sequence[int]) -> None"))
      .def("watch", &ProxyHandle::watch, nb::arg("near"), nb::arg("rank"), nb::arg("board"),
           nb::sig("def watch(self, near: crossrail._core.Address, rank: int, board: memoryview) -> None"))
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
              has_come = proxy.has_come(awaited, round, rank);
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
      .def("send_routes", &send_routes, nb::arg("round"), nb::arg("counts"))
      .def(
          "send_rows", [](ProxyHandle& self, uint32_t round) { self.post([&](auto& to) { to.send_rows(round); }); },
          nb::arg("round"))
      .def("routes_of", &routes_of, nb::arg("round"), nb::arg("rank"))
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
          "send_sums",
          [](ProxyHandle& self, uint32_t round, uint32_t partner, uint64_t first_row, uint64_t rows) {
            self.post([&](auto& to) { to.send_sums(round, partner, first_row, rows); });
          },
          nb::arg("round"), nb::arg("partner"), nb::arg("first_row"), nb::arg("rows"))
      .def(
          "say_farewell",
          [](const ProxyHandle& self, std::optional<uint32_t> why, double timeout_s) {
            self.wait(nb::float_(timeout_s), [why](moe::Proxy& proxy, Deadline deadline) {
              proxy.say_farewell(why, deadline);
              return moe::FarOutcome{};
            });
          },
          nb::arg("why").none(), nb::arg("timeout_s"), "why: a number for those who are told.")
      .def(
          "why_left", [](const ProxyHandle& self, uint32_t rank) { return self.get().why_left(rank); }, nb::arg("rank"),
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
          nb::sig("def wait(self, step: str, round: int, timeout_s: float | None) -> tuple[str, int, str]"))
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
