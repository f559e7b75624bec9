#include "moe/simd/row_loops.h"
#include "moe/simd/row_ops.h"

namespace crossrail::moe {

const RowOps kScalarRowOps = make_row_ops<Single>("scalar");

}  // namespace crossrail::moe
