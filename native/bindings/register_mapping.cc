// A peer's memory, mapped: what Engine.map gives a memoryview of.
#include <nanobind/nanobind.h>

#include <memory>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"
#include "bindings/raise.h"

namespace crossrail::bindings {

namespace {

using Self = nb::pointer_and_handle<EngineHandle>;

// The memory lives as long as this, which lives as long as a view of it. It needs neither engine nor peer, and does no
// harm in a forked child: the memory is shared with that one too.
struct MappingHandle {
  Mapping mapping;
  uint64_t length_bytes = 0;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto* handle = nb::inst_ptr<MappingHandle>(self);
  return PyBuffer_FillInfo(view, self, handle->mapping.base, static_cast<Py_ssize_t>(handle->length_bytes), 0, flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

nb::object map(Self self, nb::handle descriptor, nb::handle timeout_s) {
  const EngineRef engine = self.p->core();
  const RemoteRegionRef region = self.p->remote(to_descriptor(descriptor, "descriptor"));
  const Deadline deadline = to_deadline(timeout_s, engine->clock());
  MappingHandle handle{.mapping = {}, .length_bytes = region->length_bytes()};
  Status status = Status::kPending;
  const WaitResult result =
      wait_without_gil([&] { return engine->map(*region, deadline, interrupted, &handle.mapping, &status); });
  const Address& owner = region->peer()->address();
  if (result == WaitResult::kTimeout) {
    raise_object(make_error("connect_timeout", self.h, to_text(owner.name), owner.pid, timeout_s));
  }
  if (result == WaitResult::kClosed) status = Status::kEngineClosed;
  if (status != Status::kDone) {
    const std::string note = engine->closed() ? std::string() : engine->explain(*region->peer()).note;
    raise_object(make_error("map_failed", self.h, status_name(status), to_text(owner.name), handle.length_bytes,
                            region->descriptor().region_id, to_text(note)));
  }
  nb::object object = nb::cast(std::move(handle));
  return nb::steal(PyMemoryView_FromObject(object.ptr()));
}

}  // namespace

void register_mapping(nb::module_& module, nb::class_<EngineHandle>& engine) {
  nb::class_<MappingHandle>(module, "_Mapping", nb::is_final(), nb::type_slots(slots));
  engine.def("map", &map, nb::arg("descriptor").none(), nb::arg("timeout_s").none() = 5.0,
             nb::sig("def map(self, descriptor: RegionDescriptor, timeout_s: float | None = 5.0) -> memoryview"),
             R"(A peer's memory as a memoryview of format "B", read and write: what its engine.alloc made, on this host.

For those who agree between themselves who writes what and when: what is done by the view is outside of the engine's
contract. No count comes of it, and neither close() nor revoke() of the region keeps it out. The memory lives as long as
the view does, also after the peer closed the region or died: then the bytes are as they were left, and no one else's.
Connects to the peer at first use. Blocks, GIL released; any thread.
Raises UsageError for memory that this process cannot map (another host, memory that was registered instead of
allocated), RemoteRegionClosed, PeerLost, WaitTimeout, EngineClosed.)");
}

}  // namespace crossrail::bindings
