#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::bindings {

namespace {

// Its page is freed with it: the documentation forbids dropping it while kernels wait on it.
struct CountFlagHandle {
  Held<CountFlag> flag;
  Held<ImmCounter> counter;
  nb::object engine;
  ~CountFlagHandle() {
    if (flag && !flag.inherited()) counter->lower(flag.ref().get());
  }
};

void init(CountFlagHandle* self, const ImmCounterHandle& counter) {
  Ref<CountFlag> flag = counter.counter->raise();
  new (self) CountFlagHandle{Held<CountFlag>(std::move(flag)), Held<ImmCounter>(counter.counter.ref()), counter.engine};
}

void wait_on(const CountFlagHandle& self, uint64_t stream, int gpu, nb::handle count_object, nb::handle timeout_s) {
  const uint64_t count = to_u64(count_object, "count", device::CountWords::kEnded - 1, 1);
  if (timeout_s.is_none())
    throw UsageError("timeout_s is None: a kernel that waits for ever holds its GPU up for ever");
  const Ref<CountFlag> flag = self.flag.ref();
  const Deadline deadline = to_deadline(timeout_s, real_clock());
  const auto timeout_ns = static_cast<uint64_t>(std::max<int64_t>(deadline - now_ns(), 0));
  WithoutGil no_gil;  // the driver may be opened, and a kernel compiled
  flag->wait_on(stream, gpu, count, timeout_ns);
}

}  // namespace

void register_count_flag(nb::module_& module) {
  nb::class_<CountFlagHandle>(module, "CountFlag", nb::type_slots(engine_slots<CountFlagHandle>))
      .def("__init__", &init, nb::arg("counter"), nb::sig("def __init__(self, counter: ImmCounter) -> None"))
      .def_prop_ro(
          "given", [](const CountFlagHandle& self) { return self.flag->given(); },
          "How many counts the flag has been given so far. Any thread.")
      .def_prop_ro(
          "taken", [](const CountFlagHandle& self) { return self.flag->taken(); },
          "How many of these the kernels launched by wait_on() have taken. Any thread.")
      .def_prop_ro(
          "closed", [](const CountFlagHandle& self) { return self.flag->has_ended(); },
          "True once it gets no more counts: it was closed, its number released, or the engine closed.")
      .def_prop_ro(
          "imm", [](const CountFlagHandle& self) { return self.counter->imm(); }, "The immediate number.")
      .def_prop_ro(
          "_engine", [](const CountFlagHandle& self) { return self.engine; }, nb::sig("def _engine(self) -> Engine"))
      .def_prop_ro(
          "address", [](const CountFlagHandle& self) { return self.flag->address(); },
          "Address for the CPU of the word that says how many counts were given, 64-byte aligned. Its highest bit says "
          "that there will be no more. Valid while this object lives; read only.")
      .def(
          "address_on",
          [](const CountFlagHandle& self, nb::handle gpu) {
            const Ref<CountFlag> flag = self.flag.ref();
            const auto ordinal = static_cast<int>(to_u32(gpu, "gpu", 1 << 20));
            WithoutGil no_gil;
            return flag->address_on(ordinal);
          },
          nb::arg("gpu").none(), nb::sig("def address_on(self, gpu: int) -> int"),
          R"(Address for that GPU of the word at `address`, for kernels of your own. They load it with acquire semantics at system
scope until it is large enough, and then read what has arrived. It is in host memory, which the first call pins.

gpu: its ordinal, as in "cuda:0". Raises UsageError if there is no such GPU, and on a simulated engine; TransportError
with CUDA's error. Any thread.)")
      .def("_wait_on", &wait_on, nb::arg("stream"), nb::arg("gpu"), nb::arg("count").none(),
           nb::arg("timeout_s").none(),
           nb::sig("def _wait_on(self, stream: int, gpu: int, count: int, timeout_s: float) -> None"),
           "See CountFlag.wait_on. gpu: whose stream it is; -1: the driver is asked.")
      .def(
          "_take_missed",
          [](const CountFlagHandle& self) {
            const CountFlag::Missed missed = self.flag->take_missed();
            return std::pair(missed.wanted, missed.has_ended);
          },
          "What the first kernel wanted that ended without its counts, or 0, and whether because no more came.")
      .def("_lower", [](const CountFlagHandle& self) {
        if (!self.flag.inherited()) self.counter->lower(self.flag.ref().get());
      });
}

}  // namespace crossrail::bindings
