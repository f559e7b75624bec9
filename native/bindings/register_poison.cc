#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/handles.h"
#include "engine/poison.h"

namespace crossrail::bindings {

namespace {

constexpr uint64_t kLayoutMax = uint64_t{1} << 56;

// The Python half keeps the memory alive.
void init(Poison* self, const RegionHandle& region, nb::handle pages, nb::handle page_bytes_object,
          nb::handle stride_object, nb::handle offset_object) {
  if (!region.writable()) throw UsageError("the region is read-only: it cannot be poisoned");
  const uint64_t page_bytes = to_u64(page_bytes_object, pages.is_none() ? "nbytes" : "page_bytes", kLayoutMax);
  const uint64_t stride = to_u64(stride_object, "stride", kLayoutMax);
  const uint64_t offset = to_u64(offset_object, "offset", kLayoutMax);
  const RegionRef& core = region.core();
  const uint64_t bound = core->length_bytes();
  if (pages.is_none()) {
    if (page_bytes > bound || offset > bound - page_bytes) {
      throw UsageError("offset " + std::to_string(offset) + " + nbytes " + std::to_string(page_bytes) +
                       " exceeds the region's " + std::to_string(bound) + " bytes");
    }
    constexpr int64_t kFirst = 0;
    new (self) Poison(core->base(), bound, offset, stride, page_bytes, {.data = &kFirst, .count = 1});
  } else {
    const IndexArray indices(pages, "pages");
    new (self) Poison(core->base(), bound, offset, stride, page_bytes, indices.get());
  }
  WithoutGil no_gil;
  self->fill();
}

nb::object find(const Poison& self) {
  std::optional<Poison::Finding> finding;
  {
    WithoutGil no_gil;
    finding = self.find();
  }
  if (!finding) return nb::none();
  return nb::make_tuple(finding->offset, finding->length_bytes, to_bytes({finding->found.data(), finding->found_bytes}),
                        finding->pages);
}

}  // namespace

void register_poison(nb::module_& module) {
  nb::class_<Poison>(module, "_Poison")
      .def("__init__", &init, nb::arg("region"), nb::arg("pages").none(), nb::arg("page_bytes"), nb::arg("stride"),
           nb::arg("offset"),
           nb::sig("def __init__(self, region: Region, pages: object, page_bytes: int, stride: int, offset: int) -> "
                   "None"))
      .def("find", &find, nb::sig("def find(self) -> tuple[int, int, bytes, int] | None"));
}

}  // namespace crossrail::bindings
