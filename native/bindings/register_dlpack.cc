// Memory that another library exports by DLPack: read from its capsule, which stays that library's.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "util/errors.h"

namespace crossrail::bindings {

namespace {

constexpr uint64_t kReadOnly = 1;  // a flag of dlpack.h

// Of dlpack.h, version 1; what came before has the tensor alone, at its begin.
struct Versioned {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(Versioned*);
  uint64_t flags;
  nb::dlpack::dltensor tensor;
};

nb::tuple extents(const int64_t* begin, int32_t count) {
  nb::list list;
  for (int32_t axis = 0; axis < count; ++axis) list.append(begin[axis]);
  return nb::tuple(list);
}

// The capsule is not taken, as a consumer of DLPack would: it frees the tensor when it is dropped itself.
nb::tuple dlpack_tensor(nb::handle capsule) {
  const nb::dlpack::dltensor* tensor = nullptr;
  uint64_t flags = kReadOnly;  // what cannot say that it is writable is not written to
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<const Versioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->major != 1)
      throw UsageError("version " + std::to_string(managed->major) + " of DLPack, where 1 was asked for");
    flags = managed->flags;
    tensor = &managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    tensor = static_cast<const nb::dlpack::dltensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  } else {
    throw UsageError("no capsule of DLPack, or one that was used");
  }
  return nb::make_tuple(reinterpret_cast<uint64_t>(tensor->data) + tensor->byte_offset, tensor->device.device_type,
                        tensor->dtype.bits * tensor->dtype.lanes, extents(tensor->shape, tensor->ndim),
                        tensor->strides == nullptr ? nb::none() : nb::object(extents(tensor->strides, tensor->ndim)),
                        flags);
}

}  // namespace

void register_dlpack(nb::module_& module) {
  module.def("_dlpack_tensor", &dlpack_tensor, nb::arg("capsule").none(),
             nb::sig("def _dlpack_tensor(capsule: object) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...] | "
                     "None, int]"),
             "Address, device type, bits of an element, shape, strides in elements (None: dense), flags.");
}

}  // namespace crossrail::bindings
