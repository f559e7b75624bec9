#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"
#include "bindings/raise.h"
#include "util/readable.h"

namespace crossrail::bindings {

namespace {

using EngineArgument = nb::pointer_and_handle<EngineHandle>;

void init_registered(RegionHandle* self, EngineArgument engine, uint64_t address, nb::handle nbytes_object,
                     const std::string& access, bool writable, nb::object owner, bool is_cuda) {
  const Access wanted = to_access(access);
  const MemoryKind memory = is_cuda ? MemoryKind::kCuda : MemoryKind::kHost;
  const uint64_t nbytes = to_u64(nbytes_object, "nbytes");
  const EngineRef core = engine.p->core();
  RegionRef region;
  {
    WithoutGil no_gil;
    // Elsewhere an address from Python is only asked about.
    void* const base = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
    region = core->register_memory(base, nbytes, wanted, memory);
  }
  new (self) RegionHandle(engine, std::move(region), std::move(owner), writable);
}

void init_allocated(RegionHandle* self, EngineArgument engine, nb::handle nbytes_object, nb::handle populate_object,
                    int gpu) {
  const uint64_t nbytes = to_u64(nbytes_object, "nbytes");
  const bool populate = to_bool(populate_object, "populate");
  const EngineRef core = engine.p->core();
  RegionRef region;
  {
    WithoutGil no_gil;
    region = gpu < 0 ? core->alloc(nbytes, populate) : core->alloc_on_gpu(nbytes, gpu);
  }
  new (self) RegionHandle(engine, std::move(region), nb::object(), true);
}

// is_for_mapping distinguishes this from the other constructors.
void init_for_mapping(RegionHandle* self, EngineArgument engine, nb::handle nbytes_object, nb::handle) {
  const uint64_t nbytes = to_u64(nbytes_object, "nbytes");
  const EngineRef core = engine.p->core();
  RegionRef region;
  {
    WithoutGil no_gil;
    region = core->alloc_for_mapping(nbytes);
  }
  new (self) RegionHandle(engine, std::move(region), nb::object(), true);
}

void init_phantom(RegionHandle* self, EngineArgument engine, nb::handle nbytes_object) {
  const uint64_t nbytes = to_u64(nbytes_object, "nbytes");
  new (self) RegionHandle(engine, engine.p->core()->register_phantom(nbytes), nb::object(), true);
}

[[noreturn]] void raise_in_use(const RegionHandle& self, const char* call, nb::handle timeout_s) {
  const RegionRef region = self.core();
  std::vector<std::string> names;
  {
    const WithoutGil no_gil;
    names = region->users();
  }
  nb::list users;
  for (const std::string& name : names) users.append(to_text(name));
  raise_object(make_error("region_in_use", self.owner_engine(), call, region->length_bytes(), region->inflight_ops(),
                          users, timeout_s));
}

void close(RegionHandle& self, nb::handle timeout_s, nb::handle drain_object) {
  const RegionRef region = self.core();
  const Deadline deadline = to_deadline(timeout_s, region->clock());
  const bool drain = to_bool(drain_object, "drain");
  const WaitResult result = wait_without_gil([&] { return region->close(deadline, interrupted, drain); });
  if (result == WaitResult::kTimeout) raise_in_use(self, "close", timeout_s);
  self.take_quiet_buffer();
}

void revoke(RegionHandle& self, nb::handle timeout_s) {
  const RegionRef region = self.core();
  const Deadline deadline = to_deadline(timeout_s, region->clock());
  const WaitResult result = wait_without_gil([&] { return region->revoke(deadline, interrupted); });
  if (result == WaitResult::kTimeout) raise_in_use(self, "revoke", timeout_s);
}

nb::object renew(RegionHandle& self) {
  const RegionRef region = self.core();
  {
    WithoutGil no_gil;
    region->renew();
  }
  return self.descriptor();
}

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  try {
    nb::inst_ptr<RegionHandle>(self)->export_view(self, view, flags);
    return 0;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_BufferError, error.what());
  }
  view->obj = nullptr;
  return -1;
}

void release_buffer(PyObject* self, Py_buffer*) { nb::inst_ptr<RegionHandle>(self)->unexport_view(); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<RegionHandle>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<RegionHandle>(self)->detach();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                       {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                       {0, nullptr}};

}  // namespace

void register_region(nb::module_& module) {
  module.def(
      "_buffer_address",
      [](nb::handle buffer) {
        BufferView view;
        if (!view.acquire(buffer, PyBUF_SIMPLE)) throw UsageError("buffer is not one contiguous range of memory");
        return reinterpret_cast<uint64_t>(view.get().buf);
      },
      nb::arg("buffer"), nb::sig("def _buffer_address(buffer: object) -> int"));

  module.def(
      "_is_read_only",
      [](uint64_t address, uint64_t nbytes) {
        return is_read_only(reinterpret_cast<const std::byte*>(address), nbytes);  // NOLINT(performance-no-int-to-ptr)
      },
      nb::arg("address"), nb::arg("nbytes"), "Whether its first or its last byte is mapped, and cannot be written.");

  nb::class_<RegionHandle>(module, "Region", nb::type_slots(slots))
      .def("__init__", &init_registered, nb::arg("engine"), nb::arg("address"), nb::arg("nbytes"), nb::arg("access"),
           nb::arg("writable"), nb::arg("owner").none(), nb::arg("is_cuda"),
           nb::sig("def __init__(self, engine: Engine, address: int, nbytes: int, access: str, writable: bool, "
                   "owner: object, is_cuda: bool) -> None"))
      .def("__init__", &init_allocated, nb::arg("engine"), nb::arg("nbytes").none(), nb::arg("populate").none(),
           nb::arg("gpu"), nb::sig("def __init__(self, engine: Engine, nbytes: int, populate: bool, gpu: int) -> None"))
      .def("__init__", &init_for_mapping, nb::arg("engine"), nb::arg("nbytes"), nb::arg("is_for_mapping"),
           nb::sig("def __init__(self, engine: Engine, nbytes: int, is_for_mapping: bool) -> None"))
      .def("__init__", &init_phantom, nb::arg("engine"), nb::arg("nbytes").none(),
           nb::sig("def __init__(self, engine: Engine, nbytes: int) -> None"))
      .def_prop_ro(
          "nbytes", [](const RegionHandle& self) { return self.core()->length_bytes(); }, "Length in bytes.")
      .def_prop_ro(
          "base", [](const RegionHandle& self) { return reinterpret_cast<uint64_t>(self.core()->base()); },
          "Address of the first byte in this process.")
      .def_prop_ro(
          "access", [](const RegionHandle& self) { return access_name(self.core()->access()); },
          nb::sig("def access(self) -> str"), "What peers may do: 'local' (nothing), 'read' or 'write'.")
      .def_prop_ro(
          "descriptor", [](RegionHandle& self) { return self.descriptor(); },
          nb::sig("def descriptor(self) -> RegionDescriptor"),
          "What peers need in order to use this region. Raises UsageError while it is revoked.")
      .def_prop_ro(
          "mapped", [](const RegionHandle& self) { return self.core()->is_mapped(); },
          "Whether peers on this host can map the memory, so that bytes are copied only once.")
      .def_prop_ro(
          "device",
          [](const RegionHandle& self) {
            const RegionRef& region = self.core();
            return region->memory() == MemoryKind::kHost ? std::string("cpu") : "cuda:" + std::to_string(region->gpu());
          },
          nb::sig("def device(self) -> str"), "Where the memory is: 'cpu', or 'cuda:0' and so on.")
      .def_prop_ro(
          "gpudirect", [](const RegionHandle& self) { return self.core()->given_by(); },
          nb::sig("def gpudirect(self) -> str"),
          "How NICs access this GPU memory: 'dma-buf', or another way and why; 'no: ...' over shm and tcp; '' for host "
          "memory.")
      .def_prop_ro(
          "closed", [](const RegionHandle& self) { return self.core()->closed(); },
          "Whether it refuses new use. Something may still touch the memory until close() has returned.")
      .def_prop_ro(
          "inflight", [](const RegionHandle& self) { return self.core()->inflight_ops(); },
          "How many transfers of this engine use it now.")
      .def_prop_ro(
          "writable", [](const RegionHandle& self) { return self.writable(); },
          "False if the registered object is read-only: it cannot be the target of a read.")
      .def_prop_ro(
          "_engine", [](const RegionHandle& self) { return self.owner_engine(); },
          nb::sig("def _engine(self) -> Engine"))
      .def_prop_ro(
          "revoked", [](const RegionHandle& self) { return self.core()->revoked(); },
          "Whether revoke() has locked peers out, and renew() has not let them in again.")
      .def_prop_ro(
          "quarantined", [](const RegionHandle& self) { return self.core()->quarantined(); },
          "True while peers are refused, but one that stopped in the middle of an operation may still touch the "
          "memory. "
          "As long as it is True the memory must be neither freed nor reused; the engine does neither.")
      .def("_close", &close, nb::arg("timeout_s").none(), nb::arg("drain").none(),
           nb::sig("def _close(self, timeout_s: float | None, drain: bool) -> None"))
      .def("_revoke", &revoke, nb::arg("timeout_s").none(),
           nb::sig("def _revoke(self, timeout_s: float | None) -> None"))
      .def("renew", &renew, nb::sig("def renew(self) -> RegionDescriptor"),
           R"(Lets peers in again after revoke() has returned, and returns the descriptor that they need from now on.

The descriptor has new keys, so peers with an older descriptor stay locked out. Raises UsageError if peers are not locked
out, if one may still be using the memory, or if the region is closed; TransportError if a NIC does not register the
memory. Any thread.)")
      .def_prop_ro(
          "_is_own_gpu_memory", [](const RegionHandle& self) { return self.core()->is_own_gpu_memory(); },
          nb::sig("def _is_own_gpu_memory(self) -> bool"), "Whether the engine allocated it on a GPU.")
      .def(
          "_memoryview",
          [](nb::pointer_and_handle<RegionHandle> self) {
            self.p->check_viewable();
            return nb::steal(PyMemoryView_FromObject(self.h.ptr()));
          },
          nb::sig("def _memoryview(self) -> memoryview"));
}

}  // namespace crossrail::bindings
