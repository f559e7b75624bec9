// Arrays of numbers passed to a call: read in place, and not converted element by element through Python objects,
// unless they are plain sequences of a few ints.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <vector>

#include "bindings/convert.h"
#include "engine/engine.h"

namespace crossrail::bindings {

// Page indices: a one-dimensional contiguous array of int32, uint32, int64 or uint64.
// Owner: the caller; the buffer is held for the life of this object. An unaligned one is copied.
class IndexArray {
 public:
  IndexArray(nb::handle array, const char* argument);
  const PageIndices& get() const { return indices_; }

 private:
  nb::object array_;
  BufferView view_;
  std::vector<uint64_t> copy_;  // of an unaligned array
  PageIndices indices_;
};

// Lengths or offsets, `count` of them: an array of int64 or uint64, a sequence of ints, or one int for all.
// Unaligned arrays are copied, too.
class SizeArray {
 public:
  SizeArray(nb::handle values, const char* argument, size_t count);
  std::span<const uint64_t> get() const { return values_; }

 private:
  BufferView view_;
  std::vector<uint64_t> copy_;
  std::span<const uint64_t> values_;
};

}  // namespace crossrail::bindings
