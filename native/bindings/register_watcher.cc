#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/gil.h"
#include "bindings/handles.h"

namespace crossrail::bindings {

namespace {

void init(WatcherHandle* self, nb::pointer_and_handle<EngineHandle> engine, const NotifierHandle& notifier,
          uint64_t cookie) {
  const EngineRef core = engine.p->core();
  const Ref<Notifier> queue = notifier.notifier.ref();
  Ref<Watcher> watcher;
  {
    WithoutGil no_gil;  // on a simulated engine another thread may be inside the world
    watcher = core->alloc_watcher(queue.get(), cookie);
  }
  new (self) WatcherHandle{Held<Watcher>(std::move(watcher)), nb::borrow(engine.h)};
}

void close(const WatcherHandle& self) {
  if (self.watcher.inherited()) return;
  const Ref<Watcher> watcher = self.watcher.ref();
  WithoutGil no_gil;
  watcher->close();
}

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  try {
    if (!nb::inst_ready(self)) throw UsageError("this Watcher was never made: its __init__ has not run");
    const Ref<Watcher>& watcher = nb::inst_ptr<WatcherHandle>(self)->watcher.ref();
    return PyBuffer_FillInfo(view, self, watcher->word(), sizeof(uint64_t), 0, flags);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_BufferError, error.what());
    view->obj = nullptr;
    return -1;
  }
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_engine<WatcherHandle>)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear_engine<WatcherHandle>)},
                       {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                       {0, nullptr}};

}  // namespace

void register_watcher(nb::module_& module) {
  nb::class_<WatcherHandle>(module, "Watcher", nb::type_slots(slots))
      .def("__init__", &init, nb::arg("engine"), nb::arg("notifier"), nb::arg("cookie"),
           nb::sig("def __init__(self, engine: Engine, notifier: Notifier, cookie: int) -> None"))
      .def_prop_ro(
          "value", [](const WatcherHandle& self) { return self.watcher->value(); }, "The word now.")
      .def(
          "add",
          [](const WatcherHandle& self, nb::handle delta, nb::handle announce) {
            self.watcher->add(to_u64(delta, "delta"), to_bool(announce, "announce"));
          },
          nb::arg("delta").none() = 1, nb::kw_only(), nb::arg("announce").none() = true,
          nb::sig("def add(self, delta: int = 1, *, announce: bool = True) -> None"),
          R"(Adds to the word, atomically, modulo 2**64. Any thread.

announce=False: this change alone does not call on_change; the caller acts on it instead. Transfers that have this word
as their trigger begin in either case.)")
      .def(
          "store", [](const WatcherHandle& self, nb::handle value) { self.watcher->store(to_u64(value, "value")); },
          nb::arg("value").none(), nb::sig("def store(self, value: int) -> None"),
          "Sets the word, atomically. Any thread.")
      .def(
          "_add_up_to",
          [](const WatcherHandle& self, uint64_t limit, uint64_t delta) {
            return self.watcher->add_up_to(limit, delta);
          },
          nb::arg("limit"), nb::arg("delta"), nb::sig("def _add_up_to(self, limit: int, delta: int) -> bool"),
          "As add(delta, announce=False), unless the word would pass the limit, modulo 2**64. Whether it did.")
      .def(
          "_add_on",
          [](const WatcherHandle& self, uint64_t stream, int gpu, nb::handle delta) {
            const Ref<Watcher> watcher = self.watcher.ref();
            const uint64_t count = to_u64(delta, "delta");
            WithoutGil no_gil;  // the driver may be opened, and a kernel compiled
            watcher->add_on(stream, gpu, count);
          },
          nb::arg("stream"), nb::arg("gpu"), nb::arg("delta").none(),
          nb::sig("def _add_on(self, stream: int, gpu: int, delta: int) -> None"),
          "See Watcher.add_on. gpu: whose stream it is; -1: the driver is asked.")
      .def_prop_ro(
          "address", [](const WatcherHandle& self) { return reinterpret_cast<uint64_t>(self.watcher->word()); },
          "Where the word is, 8-byte aligned, valid while this object lives: for kernels and other writers.")
      .def("_take",
           [](const WatcherHandle& self) {
             const Watcher::Change change = self.watcher->take();
             return std::pair(change.old_value, change.new_value);
           })
      .def(
          "_memoryview",
          [](nb::pointer_and_handle<WatcherHandle> self) { return nb::steal(PyMemoryView_FromObject(self.h.ptr())); },
          nb::sig("def _memoryview(self) -> memoryview"))
      .def("_close", &close);
}

}  // namespace crossrail::bindings
