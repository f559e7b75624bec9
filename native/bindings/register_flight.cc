#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "engine/dump_triggers.h"
#include "engine/flight_dump.h"

namespace crossrail::bindings {

namespace {

using Self = nb::pointer_and_handle<EngineHandle>;

nb::bytes dump(Self self, const std::string& reason) {
  const EngineRef engine = self.p->core();
  StringSink sink;
  {
    WithoutGil no_gil;
    engine->dump(reason, &sink);
  }
  const std::string text = sink.take();
  return nb::bytes(text.data(), text.size());
}

void dump_to(Self self, const std::string& path, const std::string& reason) {
  const EngineRef engine = self.p->core();
  int error = 0;
  {
    WithoutGil no_gil;
    error = dump_to_file(engine->core(), path, reason);
  }
  if (error != 0) {
    errno = error;
    throw_errno("write", "cannot write the flight recorder to '" + path + "'");
  }
}

}  // namespace

void register_flight(nb::module_& module, nb::class_<EngineHandle>& engine) {
  nb::class_<SignalDump>(module, "_SignalDump")
      .def(nb::init<int, std::string>(), nb::arg("signum"), nb::arg("directory"))
      .def("close", [](SignalDump& self) {
        WithoutGil no_gil;
        self.close();
      });
  engine.def("_dump", &dump, nb::arg("reason"), nb::sig("def _dump(self, reason: str) -> bytes"))
      .def("_dump_to", &dump_to, nb::arg("path"), nb::arg("reason"),
           nb::sig("def _dump_to(self, path: str, reason: str) -> None"));
}

}  // namespace crossrail::bindings
