// crossrail._core.kv: names of pages, and which page has which name. See kv/page_names.h and kv/prefix_cache.h.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/gil.h"
#include "bindings/host_arrays.h"
#include "kv/page_names.h"
#include "kv/prefix_cache.h"

namespace crossrail::bindings {

namespace {

using kv::PageName;
using kv::PrefixCache;
using Use = HostArray::Use;

nb::object names_to_numpy(std::vector<PageName> names) {
  auto* kept = new std::vector<PageName>(std::move(names));
  nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<PageName>*>(vector); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(reinterpret_cast<uint8_t*>(kept->data()),
                                                               {kept->size(), sizeof(PageName)}, owner));
}

std::span<const PageName> names_of(const HostArray& array) {
  array.require_size(1, sizeof(PageName), "the bytes of a name");
  const std::span<const uint8_t> bytes = array.numbers<uint8_t>();
  static_assert(alignof(PageName) == 1);
  return {reinterpret_cast<const PageName*>(bytes.data()), array.size(0)};
}

nb::object page_names(nb::handle first, nb::handle tokens, nb::handle page_tokens) {
  const std::span<const uint8_t> block = bytes_of(first);
  if (block.size() != 64) throw UsageError("first has " + std::to_string(block.size()) + " bytes, must be 64");
  const HostArray array(tokens, "tokens", Use::kRead, 1);
  const std::span<const uint32_t> numbers = array.numbers<uint32_t>();
  const uint32_t each = to_u32(page_tokens, "page_tokens", UINT32_MAX, 1);
  std::vector<PageName> names;
  {
    const WithoutGil no_gil;
    names = kv::page_names(block.first<64>(), numbers, each);
  }
  return names_to_numpy(std::move(names));
}

// The GIL is kept and keeps threads apart: a hundred thousand pages take some milliseconds.

nb::object match(const PrefixCache& self, nb::handle names) {
  return to_numpy(self.match(names_of(HostArray(names, "names", Use::kRead, 2))));
}

size_t count_evictable(const PrefixCache& self, nb::handle pages) {
  return self.count_unheld(HostArray(pages, "pages", Use::kRead, 1).numbers<uint32_t>());
}

void hold(PrefixCache& self, nb::handle pages) {
  self.hold(HostArray(pages, "pages", Use::kRead, 1).numbers<uint32_t>());
}

nb::object let_go(PrefixCache& self, nb::handle pages) {
  return to_numpy(self.let_go(HostArray(pages, "pages", Use::kRead, 1).numbers<uint32_t>()));
}

void add(PrefixCache& self, nb::handle pages, nb::handle names) {
  const HostArray named(names, "names", Use::kRead, 2);
  self.add(HostArray(pages, "pages", Use::kRead, 1).numbers<uint32_t>(), names_of(named));
}

}  // namespace

void register_kv(nb::module_& module) {
  nb::module_ part = module.def_submodule("kv", "Names of pages of crossrail.kv, which is the API.");
  part.def("page_names", &page_names, nb::arg("first"), nb::arg("tokens"), nb::arg("page_tokens"),
           "uint8 [full pages, 32] of tokens, uint32 [n]. first: 64 bytes that all names cover.");
  nb::class_<PrefixCache>(part, "PrefixCache",
                          "Which page holds which content, and in which order unheld ones are given up: least "
                          "recently held first. pages: uint32 [n]; names: uint8 [n, 32].")
      .def(
          "__init__",
          [](PrefixCache* self, nb::handle pages) { new (self) PrefixCache(to_u32(pages, "pages", 1U << 30U, 1)); },
          nb::arg("pages"))
      .def("__len__", &PrefixCache::size, "How many pages bear names.")
      .def_prop_ro("evictable", &PrefixCache::unheld, "How many of them nobody holds.")
      .def("match", &match, nb::arg("names"), "The pages of the longest known beginning of names.")
      .def("count_evictable", &count_evictable, nb::arg("pages"), "How many of these nobody holds.")
      .def("hold", &hold, nb::arg("pages"))
      .def("let_go", &let_go, nb::arg("pages"),
           "Nobody holds these now. Those that bear names become evictable, in this order; they are returned.")
      .def("add", &add, nb::arg("pages"), nb::arg("names"),
           "Names held pages. A page keeps the name it has, a name the page that bears it.")
      .def(
          "evict", [](PrefixCache& self, nb::handle count) { return to_numpy(self.evict(to_u64(count, "count"))); },
          nb::arg("count"),
          "Takes the names of so many evictable pages, the longest unheld first, and returns the pages.")
      .def(
          "clear", [](PrefixCache& self) { return to_numpy(self.clear()); },
          "Takes all names, also of held pages, and returns the pages that were evictable.");
}

}  // namespace crossrail::bindings
