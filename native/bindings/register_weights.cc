// crossrail._core.weights: conversion on the CPU. See weights/float8.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "util/errors.h"
#include "weights/float8.h"

namespace crossrail::bindings {

namespace nb = nanobind;

namespace {

using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using Filled = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;

template <typename Array>
ptrdiff_t row_bytes(const Array& array, const char* argument) {
  if (array.shape(1) > 1 && array.stride(1) != 1) {
    throw UsageError(std::string(argument) + " has strides of " + std::to_string(array.stride(1)) +
                     " elements within a row, must be contiguous there");
  }
  return array.stride(0) * static_cast<ptrdiff_t>(array.itemsize());
}

weights::MatrixIn matrix_in(const Matrix& array) {
  return {static_cast<const std::byte*>(array.data()), array.shape(0), array.shape(1), row_bytes(array, "values")};
}

template <typename T>
weights::MatrixOut matrix_out(const Filled<T>& array, const char* argument, size_t rows, size_t columns) {
  if (array.shape(0) != rows || array.shape(1) != columns)
    throw UsageError(std::string(argument) + " has shape (" + std::to_string(array.shape(0)) + ", " +
                     std::to_string(array.shape(1)) + "), must be (" + std::to_string(rows) + ", " +
                     std::to_string(columns) + ")");
  return {reinterpret_cast<std::byte*>(array.data()), row_bytes(array, argument)};
}

bool quantise(const Matrix& values, const Filled<uint8_t>& out, const Filled<float>& scales, size_t high,
              size_t broad) {
  const bool is_wide = values.dtype() == nb::dtype<float>();
  if (!is_wide && values.dtype() != nb::dtype<uint16_t>()) throw UsageError("values must be float32 or uint16");
  if (high < 1 || broad < 1)
    throw UsageError("high is " + std::to_string(high) + " and broad " + std::to_string(broad) +
                     ", must be 1 or more: the rows and columns of a block");
  const auto blocks = [](size_t length, size_t block) { return length / block + (length % block != 0 ? 1 : 0); };
  const weights::MatrixIn in = matrix_in(values);
  const weights::MatrixOut codes = matrix_out(out, "out", in.rows, in.columns);
  const weights::MatrixOut factors = matrix_out(scales, "scales", blocks(in.rows, high), blocks(in.columns, broad));
  const WithoutGil no_gil;
  return weights::quantise(in, is_wide ? weights::Source::kFloat32 : weights::Source::kBfloat16, codes, factors, high,
                           broad);
}

}  // namespace

void register_weights(nb::module_& module) {
  nb::module_ part = module.def_submodule("weights");
  part.attr("__doc__") = "What crossrail.weights.conversion is made of, which is the API.";
  part.def("quantise", &quantise, nb::arg("values"), nb::arg("out"), nb::arg("scales"), nb::arg("high"),
           nb::arg("broad"),
           nb::sig("def quantise(values: numpy.typing.NDArray[numpy.float32 | numpy.uint16], out: "
                   "numpy.typing.NDArray[numpy.uint8], scales: numpy.typing.NDArray[numpy.float32], high: int, broad: "
                   "int) -> bool"),
           "float32, or bfloat16 as uint16, into e4m3 and a scale for each block of high x broad; rows without gaps.\n"
           "False: something is not finite. GIL released; any thread.");
}

}  // namespace crossrail::bindings
