// Array arguments of crossrail._core.moe and kv: numpy's, torch's, or any with DLPack support, read in place.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "moe/floats.h"
#include "moe/rows.h"

namespace crossrail::bindings {

namespace nb = nanobind;

// A C-contiguous, aligned array in host memory. Anything else is a UsageError that names the argument.
// Owner: the caller; the memory is held for the life of this object.
class HostArray {
 public:
  enum class Use { kRead, kWrite };
  // "bfloat16" for what numpy has as uint16.
  HostArray(nb::handle given, const char* argument, Use use, size_t dimensions);

  size_t size(size_t dimension) const { return sizes_[dimension]; }
  size_t size() const;
  void require_size(size_t dimension, size_t wanted, const char* meaning) const;

  // One of the formats of numbers; uint16 is bfloat16, which numpy lacks.
  moe::Float number_format() const;
  // Of exactly this type.
  template <typename T>
  std::span<T> numbers() const {
    require_type(nb::dtype<T>());
    return {static_cast<T*>(data_), size()};
  }
  bool is(nb::dlpack::dtype type) const { return type_ == type; }
  // Any type; two-dimensional.
  moe::RowsIn rows_in() const { return {static_cast<const std::byte*>(data_), sizes_[0], sizes_[1] * item_bytes()}; }
  moe::RowsOut rows_out() const { return {static_cast<std::byte*>(data_), sizes_[0], sizes_[1] * item_bytes()}; }
  void* data() const { return data_; }

 private:
  size_t item_bytes() const { return type_.bits / 8U; }
  void require_type(nb::dlpack::dtype type) const;

  const char* argument_;
  nb::ndarray<> writable_;
  nb::ndarray<nb::ro> readable_;
  void* data_;
  nb::dlpack::dtype type_;
  std::vector<size_t> sizes_;
};

// A numpy array that owns these values.
template <typename T>
nb::object to_numpy(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<T>*>(vector); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

// Likewise of pairs of int32: [n, 2].
template <typename Pair>
nb::object pairs_to_numpy(std::vector<Pair> pairs) {
  static_assert(sizeof(Pair) == 2 * sizeof(int32_t));
  auto* kept = new std::vector<Pair>(std::move(pairs));
  nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<Pair>*>(vector); });
  return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>(kept->data(), {kept->size(), 2}, owner));
}

}  // namespace crossrail::bindings
