#include <nanobind/nanobind.h>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/handles.h"

namespace crossrail::bindings {

namespace {

nb::list drain(const NotifierHandle& self) {
  nb::list list;
  self.notifier->drain([&](uint64_t cookie) { list.append(cookie); });
  return list;
}

bool wait(const NotifierHandle& self, nb::handle timeout_s) {
  const Deadline deadline = to_deadline(timeout_s, real_clock());
  const Ref<Notifier> notifier = self.notifier.ref();
  WithoutGil no_gil;
  return notifier->wait(deadline);
}

}  // namespace

void register_notifier(nb::module_& module) {
  nb::class_<NotifierHandle>(module, "Notifier", nb::is_final(),
                             "A queue of integers that the engine's worker fills, and an eventfd that says so.")
      .def("__init__",
           [](NotifierHandle* self) { new (self) NotifierHandle{Held<Notifier>(Ref<Notifier>::adopt(new Notifier))}; })
      .def_prop_ro(
          "fd", [](const NotifierHandle& self) { return self.notifier->fd(); },
          "Readable when there is something to drain. Owned by the notifier.")
      .def(
          "fileno", [](const NotifierHandle& self) { return self.notifier->fd(); },
          "Like fd, so that loops and select() take the notifier itself.")
      .def(
          "post", [](const NotifierHandle& self, uint64_t cookie) { self.notifier->post(cookie); }, nb::arg("cookie"),
          "Any thread.")
      .def("drain", &drain, nb::sig("def drain(self) -> list[int]"),
           "The cookies posted so far, oldest first. One thread at a time.")
      .def("wait", &wait, nb::arg("timeout_s") = nb::none(),
           nb::sig("def wait(self, timeout_s: float | None = None) -> bool"),
           "Blocks, GIL released, until there is something to drain; False when the time is over or a signal came.");
}

}  // namespace crossrail::bindings
