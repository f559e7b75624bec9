#include "bindings/arrays.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "bindings/raise.h"

namespace crossrail::bindings {

namespace {

constexpr int kBufferFlags = PyBUF_STRIDES | PyBUF_FORMAT;

// The integer type that a buffer's format (struct module syntax) names, in this machine's byte order.
std::optional<IndexType> integer_type(const Py_buffer& view) {
  std::string format = view.format == nullptr ? "B" : view.format;
  if (format.size() == 2 && (format[0] == '@' || format[0] == '=' || format[0] == '<')) format.erase(0, 1);
  if (format.size() != 1) return {};
  const bool is_signed = std::string("ilqn").find(format) != std::string::npos;
  if (!is_signed && std::string("ILQN").find(format) == std::string::npos) return {};
  if (view.itemsize == 4) return is_signed ? IndexType::kInt32 : IndexType::kUint32;
  if (view.itemsize == 8) return is_signed ? IndexType::kInt64 : IndexType::kUint64;
  return {};
}

// ctypes arrays omit strides even if they are requested: they are C-contiguous then.
bool one_dimensional_contiguous(const Py_buffer& view) {
  return view.ndim == 1 && (view.shape[0] <= 1 || view.strides == nullptr || view.strides[0] == view.itemsize);
}

// An array within packed records may begin at any address: its bytes are then copied to aligned memory.
const void* aligned(const Py_buffer& view, std::vector<uint64_t>& copy) {
  const auto address = reinterpret_cast<uintptr_t>(view.buf);
  if (view.len == 0 || address % static_cast<uintptr_t>(view.itemsize) == 0) return view.buf;
  const auto nbytes = static_cast<size_t>(view.len);
  copy.resize((nbytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
  std::memcpy(copy.data(), view.buf, nbytes);
  return copy.data();
}

// "a list", "an array of shape (3, 4), strides (32, 8), dtype float64".
std::string describe(nb::handle given, const nb::object& argument = nb::none()) {
  return nb::cast<std::string>(call_package("crossrail._raise", "describe_array", given, argument));
}

std::string index_rule(const char* argument, nb::handle given) {
  return std::string(argument) +
         " must be a one-dimensional contiguous array (numpy, torch or any buffer) of int32, uint32, int64 or uint64, "
         "not " +
         describe(given, nb::str(argument));
}

std::string size_rule(const char* argument, size_t count, nb::handle given) {
  return std::string(argument) +
         " must be a whole number for all, or a one-dimensional array of int64 or uint64 or a " +
         "sequence of whole numbers, one for each of " + std::to_string(count) + " targets, not " + describe(given);
}

}  // namespace

IndexArray::IndexArray(nb::handle array, const char* argument) : array_(nb::borrow(array)) {
  if (!view_.acquire(array_, kBufferFlags)) {
    // Not a buffer: perhaps a torch tensor, or another library's array. A view of it, never a copy.
    array_ = call_package("crossrail._buffers", "as_numpy", array);
    if (array_.is_none() || !view_.acquire(array_, kBufferFlags)) throw UsageError(index_rule(argument, array));
  }
  const Py_buffer& view = view_.get();
  const std::optional<IndexType> type = integer_type(view);
  if (!type || !one_dimensional_contiguous(view)) throw UsageError(index_rule(argument, array));
  indices_ = {aligned(view, copy_), static_cast<uint64_t>(view.shape[0]), *type};
}

SizeArray::SizeArray(nb::handle values, const char* argument, size_t count) {
  if (PyLong_Check(values.ptr())) {
    copy_.assign(count, to_u64(values, argument));
    values_ = copy_;
    return;
  }
  if (view_.acquire(values, kBufferFlags) && view_.get().ndim > 0) {
    const Py_buffer& view = view_.get();
    const std::optional<IndexType> type = integer_type(view);
    const bool fits = type == IndexType::kInt64 || type == IndexType::kUint64;
    if (!fits || !one_dimensional_contiguous(view) || static_cast<size_t>(view.shape[0]) != count) {
      throw UsageError(size_rule(argument, count, values));
    }
    const void* data = aligned(view, copy_);
    values_ = {static_cast<const uint64_t*>(data), count};
    if (type == IndexType::kInt64) {
      const auto* numbers = static_cast<const int64_t*>(data);
      const auto* negative = std::find_if(numbers, numbers + count, [](int64_t number) { return number < 0; });
      if (negative != numbers + count) {
        throw UsageError(std::string(argument) + "[" + std::to_string(negative - numbers) + "] is " +
                         std::to_string(*negative) + ", must be 0 or more");
      }
    }
    return;
  }
  if (PySequence_Check(values.ptr()) == 0) {  // a numpy scalar, perhaps
    copy_.assign(count, to_u64(values, argument));
    values_ = copy_;
    return;
  }
  if (const Py_ssize_t size = PySequence_Size(values.ptr()); static_cast<size_t>(size) != count) {
    PyErr_Clear();  // for numpy sequences without a size
    throw UsageError(size_rule(argument, count, values));
  }
  copy_.reserve(count);
  for (nb::handle value : nb::borrow<nb::sequence>(values)) copy_.push_back(to_u64(value, argument));
  values_ = copy_;
}

}  // namespace crossrail::bindings
