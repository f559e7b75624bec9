#include "moe/simd/row_ops.h"

#include <string>
#include <vector>

#include "util/errors.h"

namespace crossrail::moe {

namespace {

std::vector<const RowOps*> find_row_ops() {
  std::vector<const RowOps*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) found.push_back(&kAvx512RowOps);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) found.push_back(&kAvx2RowOps);
#endif
  found.push_back(&kPortableRowOps);
  return found;
}

}  // namespace

std::span<const RowOps* const> row_ops_here() {
  static const std::vector<const RowOps*> here = find_row_ops();
  return here;
}

const RowOps& choose_row_ops(const char* name) {
  const std::string wanted = name;
  if (wanted == "auto") return *row_ops_here().front();
  std::string known = "auto";
  for (const RowOps* ops : row_ops_here()) {
    if (wanted == ops->name) return *ops;
    known += ", " + std::string(ops->name);
  }
  throw UsageError("level is \"" + wanted + "\", this processor has " + known);
}

}  // namespace crossrail::moe
