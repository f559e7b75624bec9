"""Device code of TritonKernels.

Only what Triton 3.6 to 3.9 and the interpreter all do. Conversions go by bits: the interpreter's to bfloat16 truncates
and its to float8 is wrong; on a GPU they cost a few instructions in kernels that wait for memory. Every index that
comes from a table is masked here too, so that nothing outside of an array is touched whether or not the host looked:
by moving the end of the row, since the interpreter makes no mask of a mask and a single truth.
"""

from __future__ import annotations

from crossrail._extras import needs

with needs(__name__, "'crossrail[triton]'"):
    import triton
    import triton.language as tl

# Formats of numbers. bfloat16 is passed as int16.
BFLOAT16 = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)


@triton.jit
def widened(value, FORMAT: tl.constexpr):
    """float32 of what was loaded."""
    return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True) if FORMAT == BFLOAT16 else value.to(tl.float32)


@triton.jit
def narrowed(value, FORMAT: tl.constexpr):
    """Rounds float32 for storing: to nearest, ties to even."""
    if FORMAT == BFLOAT16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        stored = tl.where(value != value, 0x7FC0, rounded).to(tl.int16)
    elif FORMAT == FLOAT16:
        stored = value.to(tl.float16)
    else:
        stored = value
    return stored


@triton.jit
def e4m3_code(value):
    """Bits of float8 e4m3fn: to nearest, ties to even, at most 448; NaN is 0x7F with its sign.

    Numbers from 2**-6 on lose 20 bits of fraction; below, adding 2**14 leaves float32 with e4m3's steps of 2**-9.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(value), 448.0)
    large = magnitude.to(tl.int32, bitcast=True)
    normal = ((large + 0x7FFFF + ((large >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(value != value, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """float32 of such bits."""
    wide = code.to(tl.int32)
    rest = wide & 0x7F
    normal = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, normal)
    value = tl.where(rest == 0x7F, float("nan"), value)
    # Set the sign bit directly: Triton's minus subtracts from zero, and so never yields negative zero.
    return (value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["routes"])  # no variant for each number of tokens
def count_routes(indices, counts, slots, routes, BLOCK: tl.constexpr):
    """One program for each expert, which reads all routes: their order decides the slots, whatever runs first."""
    expert = tl.program_id(0)
    seen = tl.full((), 0, tl.int32)
    for begin in range(0, routes, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mine = (tl.load(indices + at, mask=at < routes, other=-1) == expert).to(tl.int32)
        tl.store(slots + at, seen + tl.cumsum(mine, 0) - 1, mask=mine == 1)
        seen += tl.sum(mine, 0)
    tl.store(counts + expert, seen)


@triton.jit
def pack_rows(
    target,
    x,
    scales,
    table,
    rows,
    width,
    extra,
    stride,
    HAS_TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each row and block of it. Sizes are in the elements that the arrays are seen as."""
    to = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = to
    if HAS_TABLE:
        row = tl.load(table + to).to(tl.int64)
    end = tl.where((row >= 0) & (row < rows), width + extra, 0)
    number = tl.load(x + row * width + at, mask=(at < width) & (at < end), other=0)
    scale = tl.load(scales + row * extra + at - width, mask=(at >= width) & (at < end), other=0)
    tl.store(target + to * stride + at, number | scale, mask=at < stride)


@triton.jit
def pull_rows(
    x,
    scales,
    source,
    table,
    rows,
    outputs,
    width,
    extra,
    stride,
    BLOCK: tl.constexpr,
):
    """A program for each move and block of its row."""
    move = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(table + 2 * move).to(tl.int64)
    to = tl.load(table + 2 * move + 1).to(tl.int64)
    end = tl.where((row >= 0) & (row < rows) & (to >= 0) & (to < outputs), width + extra, 0)
    value = tl.load(source + row * stride + at, mask=at < end, other=0)
    tl.store(x + to * width + at, value, mask=(at < width) & (at < end))
    tl.store(scales + to * extra + at - width, value, mask=(at >= width) & (at < end))


@triton.jit
def reduce_rows(
    out,
    addresses,
    lengths,
    where,
    weights,
    number,
    sources,
    hidden,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_NUMBER: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each token and block of its row. Launched without fused multiply-add. number: of a round; the sums
    are NaN when it is negative.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    if ACCUMULATE:
        total = widened(tl.load(out + token * hidden + at, mask=inside, other=0), OUT_FORMAT)
    for k in tl.static_range(TOP_K):  # unrolled: rows are loaded side by side
        place = token * TOP_K + k
        source = tl.load(where + 2 * place)
        row = tl.load(where + 2 * place + 1).to(tl.int64)
        known = (source >= 0) & (source < sources)
        known = known & (row >= 0) & (row < tl.load(lengths + source, mask=known, other=0))
        address = tl.load(addresses + source, mask=known, other=0)
        if FORMAT == BFLOAT16:
            pointer = address.to(tl.pointer_type(tl.int16))
        elif FORMAT == FLOAT16:
            pointer = address.to(tl.pointer_type(tl.float16))
        else:
            pointer = address.to(tl.pointer_type(tl.float32))
        given = at < tl.where(known, hidden, 0)
        term = widened(tl.load(pointer + row * hidden + at, mask=given, other=0), FORMAT)
        if HAS_WEIGHTS:
            term = term * tl.load(weights + place)
        total = tl.where(given, total + term, total)
    if HAS_NUMBER:
        total = tl.where(tl.load(number) < 0, float("nan"), total)
    tl.store(out + token * hidden + at, narrowed(total, OUT_FORMAT), mask=inside)


@triton.jit
def quantize_rows(
    codes,
    scales,
    x,
    hidden,
    block,
    blocks,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program for each row and GROUP blocks of it."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    lane = tl.arange(0, BLOCK)[None, :]
    at = number[:, None] * block + lane
    inside = (lane < block) & (at < hidden)
    values = widened(tl.load(x + row * hidden + at, mask=inside, other=0), FORMAT)
    # Compared as bits, infinity is above all numbers and NaN above infinity, so NaN reaches the scale.
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    magnitude = tl.where(most < 1e-4, 1e-4, most).to(tl.float32)
    largest = tl.full((GROUP,), 448.0, tl.float32)
    tl.store(scales + row * blocks + number, tl.div_rn(magnitude, largest), mask=number < blocks)
    factor = tl.div_rn(largest, magnitude)
    tl.store(codes + row * hidden + at, e4m3_code(values * factor[:, None]), mask=inside)


@triton.jit
def dequantize_rows(
    out,
    codes,
    scales,
    hidden,
    block,
    blocks,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program for each row and GROUP blocks of it."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    lane = tl.arange(0, BLOCK)[None, :]
    at = number[:, None] * block + lane
    inside = (lane < block) & (at < hidden)
    values = e4m3_value(tl.load(codes + row * hidden + at, mask=inside, other=0))
    scale = tl.load(scales + row * blocks + number, mask=number < blocks, other=0)
    tl.store(out + row * hidden + at, narrowed(values * scale[:, None], FORMAT), mask=inside)
