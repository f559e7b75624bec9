#include "bindings/host_arrays.h"

#include <nanobind/stl/string.h>

#include <string>

#include "bindings/convert.h"
#include "bindings/raise.h"
#include "util/errors.h"

namespace crossrail::bindings {

namespace {

constexpr auto kBrainFloat = nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
constexpr auto kHalfFloat = nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};

std::string type_name(nb::dlpack::dtype type) {
  if (type == kBrainFloat) return "bfloat16";
  const char* kind = "a type";
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int)) kind = "int";
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)) kind = "uint";
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) kind = "float";
  return kind + std::string(*kind == 'a' ? " of bits: " : "") + std::to_string(type.bits);
}

std::string describe(nb::handle given) {
  return nb::cast<std::string>(call_package("crossrail._raise", "describe_array", given));
}

}  // namespace

HostArray::HostArray(nb::handle given, const char* argument, Use use, size_t dimensions) : argument_(argument) {
  const auto refuse = [&](const std::string& what) {
    throw UsageError(std::string(argument) + " must be " + what + ", not " + describe(given));
  };
  const auto look_at = [&](const auto& array) {
    if (array.device_type() != nb::device::cpu::value) refuse("in host memory");
    if (array.ndim() != dimensions) refuse("an array of " + std::to_string(dimensions) + " dimensions");
    type_ = array.dtype();
    if (type_.lanes != 1 || type_.bits == 0 || type_.bits % 8U != 0) refuse("of elements of whole bytes");
    size_t stride = 1;
    for (size_t i = dimensions; i-- > 0;) {
      if (array.size() > 0 && array.shape(i) > 1 && array.stride(i) != static_cast<int64_t>(stride))
        refuse("C-contiguous");
      stride *= array.shape(i);
    }
    for (size_t i = 0; i < dimensions; ++i) sizes_.push_back(array.shape(i));
    data_ = const_cast<void*>(static_cast<const void*>(array.data()));
    if (reinterpret_cast<uintptr_t>(data_) % item_bytes() != 0) refuse("aligned to its elements");
  };
  if (use == Use::kWrite) {
    if (!nb::try_cast(given, writable_, false)) refuse("a writable array in host memory (numpy, torch or DLPack)");
    look_at(writable_);
  } else {
    if (!nb::try_cast(given, readable_, false)) refuse("an array in host memory (numpy, torch or DLPack)");
    look_at(readable_);
  }
}

size_t HostArray::size() const {
  size_t product = 1;
  for (const size_t size : sizes_) product *= size;
  return product;
}

void HostArray::require_size(size_t dimension, size_t wanted, const char* meaning) const {
  if (sizes_[dimension] == wanted) return;
  throw UsageError(std::string(argument_) + ".shape[" + std::to_string(dimension) + "] is " +
                   std::to_string(sizes_[dimension]) + ", must be " + std::to_string(wanted) + ", " + meaning);
}

moe::Float HostArray::number_format() const {
  if (type_ == kBrainFloat || type_ == nb::dtype<uint16_t>()) return moe::Float::kBfloat16;
  if (type_ == kHalfFloat) return moe::Float::kFloat16;
  if (type_ == nb::dtype<float>()) return moe::Float::kFloat32;
  throw UsageError(std::string(argument_) + " is of " + type_name(type_) +
                   ", must be float32, float16 or bfloat16 (uint16 in numpy)");
}

void HostArray::require_type(nb::dlpack::dtype type) const {
  if (type_ == type) return;
  throw UsageError(std::string(argument_) + " is of " + type_name(type_) + ", must be " + type_name(type));
}

}  // namespace crossrail::bindings
