// Arguments of crossrail._core.bench, in the form that its loops take.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "bench/guard.h"
#include "bindings/gil.h"

namespace crossrail::bindings {

namespace nb = nanobind;

using Indices = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstMemory = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Memory = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Durations = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::span<const int64_t> as_span(const Indices& pages) { return {pages.data(), pages.size()}; }
inline std::span<const std::byte> as_span(const ConstMemory& memory) {
  return std::as_bytes(std::span(memory.data(), memory.size()));
}
inline std::span<std::byte> as_span(const Memory& memory) {
  return std::as_writable_bytes(std::span(memory.data(), memory.size()));
}
inline std::span<const uint8_t> as_span(const nb::bytes& bytes) {
  return {static_cast<const uint8_t*>(bytes.data()), bytes.size()};
}
// The Python error is set when this says stop; Interrupted carries no information.
inline bool python_interrupted() {
  park_if_exiting();
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

inline bench::Guard make_guard(const char* what, double timeout_s) {
  return bench::Guard(what, timeout_s, python_interrupted);
}

}  // namespace crossrail::bindings
