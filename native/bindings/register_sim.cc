// crossrail._core.SimWorld: the basis of crossrail.sim.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/handles.h"
#include "bindings/sim_world.h"

namespace crossrail::bindings {

namespace {

using Self = SimWorldHandle&;

// As from NicProfile.as_tuple(): name, bytes/s, works/s, latency, completion, jitter, overhead (ns), ordered, names its
// paths, works, bytes of a work.
using RailTuple =
    std::tuple<std::string, uint64_t, uint64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, uint32_t, uint64_t>;

sim::NicModel model_of(const RailTuple& rail) {
  sim::NicModel model;
  std::tie(model.name, model.bytes_per_s, model.works_per_s, model.latency_ns, model.completion_ns, model.jitter_ns,
           model.overhead_ns, model.is_ordered, model.names_imm_paths, model.works_max, model.work_bytes_max) = rail;
  return model;
}

uint32_t add_host(Self self, const std::string& name, const std::vector<RailTuple>& rails,
                  const std::tuple<uint64_t, int64_t>& local) {
  std::vector<sim::NicModel> models;
  for (const RailTuple& rail : rails) models.push_back(model_of(rail));
  std::lock_guard lock(self.world->lock());
  return self.world->fabric().add_host(name, std::move(models), {std::get<0>(local), std::get<1>(local)});
}

// None: no deadline. Nanoseconds since the world began.
Deadline clock_time(nb::handle since_begin_ns) {
  constexpr uint64_t kLatest = static_cast<uint64_t>(kNoDeadline - sim::World::kOriginNs) - 1;
  return since_begin_ns.is_none()
             ? kNoDeadline
             : static_cast<Deadline>(to_u64(since_begin_ns, "deadline_ns", kLatest)) + sim::World::kOriginNs;
}

// Runs until the notifier has something ("news"), user callbacks are due ("callbacks"), the deadline is reached
// ("deadline": the clock stands there), nothing is left to happen and there is no deadline ("idle"), or steps_max steps
// or some real time have passed, or the clock is at the limit, where it stops ("more"). goes_on: the previous result
// was "more", and nothing was done in between that the world could notice. The amount of real time must not influence
// anything, so watchers are not woken then.
const char* run_until(Self self, nb::handle deadline_ns, nb::handle notifier, uint32_t steps_max, nb::handle limit_ns,
                      bool goes_on) {
  constexpr int64_t kRealNsMax = 20'000'000;
  constexpr uint32_t kStepsPerLook = 256;
  const Deadline until = clock_time(deadline_ns);
  const Deadline limit = clock_time(limit_ns);
  const Ref<Notifier> watched =
      notifier.is_none() ? Ref<Notifier>() : nb::cast<NotifierHandle&>(notifier).notifier.ref();
  const std::shared_ptr<sim::World> world = self.world;
  const Ref<Notifier> callbacks = self.callbacks;
  const WithoutGil no_gil;
  const sim::World::Wait wait(world.get());
  if (!goes_on) world->wake_watchers();
  const int64_t end_ns = now_ns() + kRealNsMax;
  for (uint32_t steps = 1;; ++steps) {
    if (watched && watched->has_posts()) return "news";
    if (callbacks && callbacks->has_posts()) return "callbacks";
    switch (world->advance(until, limit)) {
      case Simulation::Step::kMoved:
        if (limit != kNoDeadline && world->now_ns() >= limit) return "more";
        if (steps == steps_max || (steps % kStepsPerLook == 0 && now_ns() >= end_ns)) return "more";
        break;
      case Simulation::Step::kReached:
        if (watched && watched->has_posts()) return "news";
        if (callbacks && callbacks->has_posts()) return "callbacks";
        return limit < until ? "more" : "deadline";
      case Simulation::Step::kIdle:
        if (watched && watched->has_posts()) return "news";
        return callbacks && callbacks->has_posts() ? "callbacks" : "idle";
      case Simulation::Step::kHeld:
        return "more";
    }
  }
}

template <typename Deed>
void at(Self self, nb::handle at_ns, Deed deed) {
  const std::shared_ptr<sim::World> world = self.world;
  const Deadline when = at_ns.is_none() ? world->now_ns() : clock_time(at_ns);
  const WithoutGil no_gil;
  world->at(when, [raw = world.get(), deed] { deed(*raw); });
}

// A network fault, with the lock held.
template <typename Change>
void on_fabric(Self self, nb::handle at_ns, Change change) {
  at(self, at_ns, [change](sim::World& world) {
    std::lock_guard lock(world.lock());
    change(world.fabric());
  });
}

// fault: a number of its own for a fault that has its own end; 0 for one that lasts until all are ended, and to end
// all.
void register_faults(nb::class_<SimWorldHandle>& world) {
  world
      .def(
          "set_rail_up",
          [](Self self, uint32_t host, uint32_t rail, bool up, nb::handle at_ns, sim::FaultNumber fault) {
            on_fabric(self, at_ns, [=](sim::Fabric& fabric) { fabric.set_rail_up(host, rail, up, fault); });
          },
          nb::arg("host"), nb::arg("rail"), nb::arg("up"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def set_rail_up(self, host: int, rail: int, up: bool, at_ns: int | None, fault: int) -> None"))
      .def(
          "set_rail_full",
          [](Self self, uint32_t host, uint32_t rail, bool full, nb::handle at_ns, sim::FaultNumber fault) {
            on_fabric(self, at_ns, [=](sim::Fabric& fabric) { fabric.set_rail_full(host, rail, full, fault); });
          },
          nb::arg("host"), nb::arg("rail"), nb::arg("full"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def set_rail_full(self, host: int, rail: int, full: bool, at_ns: int | None, fault: int) -> None"))
      .def(
          "set_slowness",
          [](Self self, uint32_t host, uint32_t rail, uint32_t permille, nb::handle at_ns, sim::FaultNumber fault) {
            on_fabric(self, at_ns, [=](sim::Fabric& fabric) { fabric.set_slowness(host, rail, permille, fault); });
          },
          nb::arg("host"), nb::arg("rail"), nb::arg("permille"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def set_slowness(self, host: int, rail: int, permille: int, at_ns: int | None, fault: int) -> None"))
      .def(
          "set_partition",
          [](Self self, uint32_t a, uint32_t b, bool parted, nb::handle at_ns, sim::FaultNumber fault) {
            on_fabric(self, at_ns, [=](sim::Fabric& fabric) { fabric.set_partition(a, b, parted, fault); });
          },
          nb::arg("a"), nb::arg("b"), nb::arg("parted"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def set_partition(self, a: int, b: int, parted: bool, at_ns: int | None, fault: int) -> None"))
      .def(
          "set_silence",
          [](Self self, uint32_t source, uint32_t to, bool silent, nb::handle at_ns, sim::FaultNumber fault) {
            on_fabric(self, at_ns, [=](sim::Fabric& fabric) { fabric.set_silence(source, to, silent, fault); });
          },
          nb::arg("source"), nb::arg("to"), nb::arg("silent"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def set_silence(self, source: int, to: int, silent: bool, at_ns: int | None, fault: int) -> None"))
      .def(
          "set_failing",
          [](Self self, uint32_t host, nb::handle rail, uint32_t chance_ppm, uint64_t count, nb::handle at_ns) {
            on_fabric(self, at_ns, [=, rail = to_rail(rail)](sim::Fabric& fabric) {
              fabric.set_failing(host, rail, chance_ppm, count);
            });
          },
          nb::arg("host"), nb::arg("rail").none(), nb::arg("chance_ppm"), nb::arg("count"), nb::arg("at_ns").none(),
          nb::sig("def set_failing(self, host: int, rail: int | None, chance_ppm: int, count: int, at_ns: int | None) "
                  "-> None"))
      .def(
          "set_withholding",
          [](Self self, uint32_t host, nb::handle rail, bool withholds, nb::handle at_ns, sim::FaultNumber fault) {
            on_fabric(self, at_ns, [=, rail = to_rail(rail)](sim::Fabric& fabric) {
              fabric.set_withholding(host, rail, withholds, fault);
            });
          },
          nb::arg("host"), nb::arg("rail").none(), nb::arg("withholds"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def set_withholding(self, host: int, rail: int | None, withholds: bool, at_ns: int | None, fault: "
                  "int) -> None"))
      .def(
          "set_registrations_to_fail",
          [](Self self, uint32_t host, nb::handle rail, uint64_t count, nb::handle at_ns) {
            on_fabric(self, at_ns, [=, rail = to_rail(rail)](sim::Fabric& fabric) {
              fabric.set_registrations_to_fail(host, rail, count);
            });
          },
          nb::arg("host"), nb::arg("rail").none(), nb::arg("count"), nb::arg("at_ns").none(),
          nb::sig("def set_registrations_to_fail(self, host: int, rail: int | None, count: int, at_ns: int | None) -> "
                  "None"))
      .def(
          "set_datagram_faults",
          [](Self self, uint32_t loss_ppm, uint32_t doubling_ppm, nb::handle at_ns) {
            on_fabric(self, at_ns, [=](sim::Fabric& fabric) { fabric.set_datagram_faults(loss_ppm, doubling_ppm); });
          },
          nb::arg("loss_ppm"), nb::arg("doubling_ppm"), nb::arg("at_ns").none(),
          nb::sig("def set_datagram_faults(self, loss_ppm: int, doubling_ppm: int, at_ns: int | None) -> None"))
      .def(
          "freeze",
          [](Self self, uint32_t engine, bool frozen, nb::handle at_ns, sim::FaultNumber fault) {
            at(self, at_ns, [=](sim::World& native) { native.freeze(engine, frozen, fault); });
          },
          nb::arg("engine"), nb::arg("frozen"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def freeze(self, engine: int, frozen: bool, at_ns: int | None, fault: int) -> None"))
      .def(
          "kill",
          [](Self self, uint32_t engine, nb::handle at_ns) {
            at(self, at_ns, [=](sim::World& native) { native.kill(engine); });
          },
          nb::arg("engine"), nb::arg("at_ns").none(), nb::sig("def kill(self, engine: int, at_ns: int | None) -> None"))
      .def(
          "freeze_host",
          [](Self self, uint32_t host, bool frozen, nb::handle at_ns, sim::FaultNumber fault) {
            at(self, at_ns, [=](sim::World& native) {
              for (const uint32_t engine : native.engines_on(host)) native.freeze(engine, frozen, fault);
            });
          },
          nb::arg("host"), nb::arg("frozen"), nb::arg("at_ns").none(), nb::arg("fault"),
          nb::sig("def freeze_host(self, host: int, frozen: bool, at_ns: int | None, fault: int) -> None"))
      .def(
          "kill_host",
          [](Self self, uint32_t host, nb::handle at_ns) {
            at(self, at_ns, [=](sim::World& native) {
              for (const uint32_t engine : native.engines_on(host)) native.kill(engine);
            });
          },
          nb::arg("host"), nb::arg("at_ns").none(),
          nb::sig("def kill_host(self, host: int, at_ns: int | None) -> None"));
}

}  // namespace

void register_sim(nb::module_& module) {
  nb::class_<SimWorldHandle> world(module, "SimWorld", nb::is_final(), "The native half of crossrail.sim.World.");
  world.def(nb::init<uint64_t, size_t, uint64_t>(), nb::arg("seed"), nb::arg("log_lines_max"), nb::arg("twin"))
      .def("add_host", &add_host, nb::arg("name"), nb::arg("rails"), nb::arg("local"))
      .def_prop_ro(
          "now_ns", [](Self self) { return self.world->now_ns() - sim::World::kOriginNs; },
          "Virtual nanoseconds since the world began.")
      .def_prop_ro(
          "is_calm", [](Self self) { return self.world->is_calm(); },
          "Nothing is under way and no fault is scheduled: only timers of idle engines are left.")
      .def("run_until", &run_until, nb::arg("deadline_ns").none(), nb::arg("notifier").none(), nb::arg("steps_max") = 0,
           nb::arg("limit_ns") = nb::none(), nb::arg("goes_on") = false,
           nb::sig("def run_until(self, deadline_ns: int | None, notifier: Notifier | None, steps_max: int = 0, "
                   "limit_ns: int | None = None, goes_on: bool = False) -> str"))
      .def(
          "set_callbacks",
          [](Self self, const NotifierHandle& notifier, nb::object run) {
            self.set_callbacks(notifier.notifier.ref(), std::move(run));
          },
          nb::arg("notifier"), nb::arg("run"),
          nb::sig("def set_callbacks(self, notifier: Notifier, run: collections.abc.Callable[[], None]) -> None"),
          "run() is called by threads that wait, between steps, when the notifier has something.")
      .def_prop_ro("log", [](Self self) { return self.world->log_lines(); })
      .def_prop_ro("log_digest", [](Self self) { return self.world->log_digest(); })
      .def_prop_ro(
          "totals",
          [](Self self) {
            const sim::Totals totals = self.world->totals();
            return std::tuple(totals.works, totals.bytes, totals.events, totals.turns);
          },
          "works, bytes, events, turns of engines.");
  register_faults(world);
}

}  // namespace crossrail::bindings
