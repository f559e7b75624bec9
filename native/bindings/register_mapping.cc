// A peer's memory, mapped: Engine.map returns a memoryview of it or, for GPU memory, an array with Numba's protocol.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/explanation.h"
#include "bindings/handles.h"
#include "bindings/raise.h"

namespace crossrail::bindings {

namespace {

using Self = nb::pointer_and_handle<EngineHandle>;

// The memory lives as long as this, which lives as long as a view of it. It needs neither engine nor peer, and is
// harmless in a forked child, which shares the memory.
struct MappingHandle {
  Mapping mapping;
  uint64_t length_bytes = 0;
};

// Likewise, for kernels. A forked child leaves it alone.
struct GpuMappingHandle {
  MappingHandle of;
  int gpu = 0;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto* handle = nb::inst_ptr<MappingHandle>(self);
  return PyBuffer_FillInfo(view, self, handle->mapping.base, static_cast<Py_ssize_t>(handle->length_bytes), 0, flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

void check_kind(const RegionDescriptor& descriptor, int gpu) {
  if (descriptor.memory == MemoryKind::kHost && gpu >= 0)
    throw UsageError("device is 'cuda:" + std::to_string(gpu) + "', must be None: the region is host memory");
  if (descriptor.memory == MemoryKind::kCuda && gpu < 0)
    throw UsageError(
        "device is None, and the region is memory of a GPU: name the GPU whose kernels are to use it, as "
        "device='cuda:0'");
}

// gpu: -1 for host memory.
nb::object map(Self self, nb::handle descriptor, nb::handle timeout_s, int gpu) {
  const EngineRef engine = self.p->core();
  DescriptorHandle& given = to_descriptor(descriptor, "descriptor");
  check_kind(*given.value, gpu);
  const RemoteRegionRef region = self.p->remote(given);
  const Deadline deadline = to_deadline(timeout_s, engine->clock());
  MappingHandle handle{.mapping = {}, .length_bytes = region->length_bytes()};
  Status status = Status::kPending;
  const WaitResult result =
      wait_without_gil([&] { return engine->map(*region, gpu, deadline, interrupted, &handle.mapping, &status); });
  const Address& owner = region->peer()->address();
  if (result == WaitResult::kTimeout) {
    raise_object(make_error("connect_timeout", self.h, to_text(owner.name), owner.pid, timeout_s));
  }
  if (result == WaitResult::kClosed) status = Status::kEngineClosed;
  if (status != Status::kDone) {
    std::string note = handle.mapping.trouble;
    if (note.empty() && !engine->closed()) note = explain_without_gil(*engine, *region->peer()).note;
    raise_object(make_error(gpu < 0 ? "map_failed" : "gpu_map_failed", self.h, status_name(status), to_text(owner.name),
                            handle.length_bytes, region->descriptor().region_id, to_text(note)));
  }
  if (gpu >= 0) return nb::cast(GpuMappingHandle{.of = std::move(handle), .gpu = gpu});
  nb::object object = nb::cast(std::move(handle));
  return nb::steal(PyMemoryView_FromObject(object.ptr()));
}

nb::dict cuda_array(const GpuMappingHandle& self) {
  nb::dict shown;
  shown["shape"] = nb::make_tuple(self.of.length_bytes);
  shown["typestr"] = "|u1";
  shown["data"] = nb::make_tuple(reinterpret_cast<uint64_t>(self.of.mapping.base), false);
  shown["version"] = 3;
  return shown;
}

// DLPack's capsule. Unlike an address it says for which GPU the memory is mapped: torch assumes that an address belongs
// to the GPU whose memory it is, and would make an unwanted copy.
nb::object dlpack(nb::pointer_and_handle<GpuMappingHandle> self, const nb::kwargs&) {
  const size_t shape[1] = {self.p->of.length_bytes};
  const nb::ndarray<> array(self.p->of.mapping.base, 1, shape, self.h, nullptr, nb::dtype<uint8_t>(),
                            nb::device::cuda::value, self.p->gpu);
  return nb::cast(array, nb::rv_policy::reference);  // without a framework: the capsule
}

std::string show(const GpuMappingHandle& self) {
  return "<GpuMapping of " + std::to_string(self.of.length_bytes) + " bytes for cuda:" + std::to_string(self.gpu) + ">";
}

}  // namespace

void register_mapping(nb::module_& module, nb::class_<EngineHandle>& engine) {
  nb::class_<MappingHandle>(module, "_Mapping", nb::is_final(), nb::type_slots(slots));
  nb::class_<GpuMappingHandle>(
      module, "GpuMapping", nb::is_final(),
      "A peer's GPU memory, mapped for kernels of a local GPU by Engine.map(device=). It stays mapped as long as "
      "this object or a tensor made of it (torch.from_dlpack(mapping)), and until kernels that use it have ended.")
      .def_prop_ro(
          "nbytes", [](const GpuMappingHandle& self) { return self.of.length_bytes; }, "Length in bytes.")
      .def_prop_ro(
          "device", [](const GpuMappingHandle& self) { return "cuda:" + std::to_string(self.gpu); },
          nb::sig("def device(self) -> str"), "The GPU whose kernels reach it, as 'cuda:0'.")
      .def_prop_ro("__cuda_array_interface__", &cuda_array,
                   nb::sig("def __cuda_array_interface__(self) -> dict[str, typing.Any]"),
                   "Numba's protocol, which torch, CuPy and others speak: bytes in one dimension.")
      .def("__dlpack__", &dlpack, nb::sig("def __dlpack__(self, **kwargs: typing.Any) -> typing.Any"),
           "For torch.from_dlpack and others. No stream is waited for: there is none of ours.")
      .def(
          "__dlpack_device__",
          [](const GpuMappingHandle& self) { return nb::make_tuple(nb::device::cuda::value, self.gpu); },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def("__repr__", &show);
  engine.def("_map", &map, nb::arg("descriptor").none(), nb::arg("timeout_s").none(), nb::arg("gpu"),
             nb::sig("def _map(self, descriptor: RegionDescriptor, timeout_s: float | None, gpu: int) -> typing.Any"));
}

}  // namespace crossrail::bindings
