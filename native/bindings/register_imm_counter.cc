#include <nanobind/nanobind.h>

#include <limits>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"
#include "bindings/raise.h"

namespace crossrail::bindings {

namespace {

constexpr uint64_t kCountMax = std::numeric_limits<uint64_t>::max() / kUnitsPerCount;

void init(ImmCounterHandle* self, nb::pointer_and_handle<EngineHandle> engine, nb::handle imm) {
  const EngineRef& core = engine.p->core();
  Ref<ImmCounter> counter = imm.is_none() ? core->alloc_imm() : core->imm_counter(to_u32(imm, "imm", kImmMax));
  new (self) ImmCounterHandle{Held<ImmCounter>(std::move(counter)), nb::borrow(engine.h)};
}

// Counts were taken. The handler of a signal that came meanwhile would run as we return to Python, and what it raises
// would lose them: so it runs now.
void keep_unless_interrupted(ImmCounter& counter, uint64_t count) {
  if (PyErr_CheckSignals() == 0) return;
  counter.arrive(count * kUnitsPerCount);
  throw nb::python_error();
}

void wait(const ImmCounterHandle& self, nb::handle count_object, nb::handle timeout_s) {
  const uint64_t count = to_u64(count_object, "count", kCountMax);
  const Ref<ImmCounter> counter = self.counter.ref();
  const Deadline deadline = to_deadline(timeout_s, counter->clock());
  if (counter->try_consume(count)) return keep_unless_interrupted(*counter, count);
  switch (wait_without_gil([&] { return counter->wait(count, deadline, interrupted); })) {
    case WaitResult::kReady:
      return keep_unless_interrupted(*counter, count);
    case WaitResult::kInterrupted:
      return;
    case WaitResult::kTimeout:
      raise_object(make_error("counter_timeout", self.engine, counter->imm(), counter->poll(), count, timeout_s));
    case WaitResult::kClosed:
      raise_object(make_error("counter_closed", self.engine, counter->imm(), counter->poll(), count));
  }
}

}  // namespace

void register_imm_counter(nb::module_& module) {
  nb::class_<ImmCounterHandle>(module, "ImmCounter", nb::type_slots(engine_slots<ImmCounterHandle>))
      .def("__init__", &init, nb::arg("engine"), nb::arg("imm").none(),
           nb::sig("def __init__(self, engine: Engine, imm: int | None) -> None"))
      .def_prop_ro(
          "imm", [](const ImmCounterHandle& self) { return self.counter->imm(); }, "The immediate number.")
      .def(
          "poll", [](const ImmCounterHandle& self) { return self.counter->poll(); },
          "How many counts there are to take now. Takes none. Any thread, never blocks.")
      .def(
          "try_consume",
          [](const ImmCounterHandle& self, nb::handle count) {
            return self.counter->try_consume(to_u64(count, "count", kCountMax));
          },
          nb::arg("count").none() = 1, nb::sig("def try_consume(self, count: int = 1) -> bool"),
          "Takes `count` counts if there are as many and no earlier wait is queued for them; else takes none and "
          "returns "
          "False. Any thread, never blocks.")
      .def("wait", &wait, nb::arg("count").none() = 1, nb::arg("timeout_s") = nb::none(),
           nb::sig("def wait(self, count: int = 1, timeout_s: float | None = None) -> None"),
           R"(Blocks until `count` counts have arrived, and takes them. Any thread, with the GIL released.

Several waits are served in the order in which they began. timeout_s: seconds; None: no limit. Raises WaitTimeout
("7 of 10 arrived"), EngineClosed, or KeyboardInterrupt on Ctrl-C; none is taken then.)")
      .def_prop_ro(
          "closed", [](const ImmCounterHandle& self) { return self.counter->closed(); },
          "True once the engine was closed, or the number released.")
      .def_prop_ro(
          "_engine", [](const ImmCounterHandle& self) { return self.engine; }, nb::sig("def _engine(self) -> Engine"))
      .def(
          "_notify",
          [](const ImmCounterHandle& self, nb::handle count, const NotifierHandle& notifier, uint64_t cookie) {
            return self.counter->notify(to_u64(count, "count", kCountMax), notifier.notifier.ref().get(), cookie);
          },
          nb::arg("count").none(), nb::arg("notifier"), nb::arg("cookie"),
          nb::sig("def _notify(self, count: int, notifier: Notifier, cookie: int) -> int"))
      .def(
          "_cancel_notify",
          [](const ImmCounterHandle& self, uint64_t ticket) { return self.counter->cancel_notify(ticket); },
          nb::arg("ticket"), "True: withdrawn. False: served, the cookie comes or came.")
      .def(
          "_give_back",
          [](const ImmCounterHandle& self, nb::handle count) {
            self.counter->arrive(to_u64(count, "count", kCountMax) * kUnitsPerCount);
          },
          nb::arg("count"), nb::sig("def _give_back(self, count: int) -> None"),
          "Returns counts that were taken for somebody who left.");
}

}  // namespace crossrail::bindings
