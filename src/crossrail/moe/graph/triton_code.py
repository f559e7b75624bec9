"""Device code of TritonGraphKernels. What holds for crossrail.moe.kernels.triton_code holds here.

Sizes of rows, and offsets from rows of even rounds to those of odd ones, are in the elements that the arrays are seen
as. `stride` of the board is in int32. How many tokens there are makes no variant of a kernel: none is compiled or
loaded once rounds have begun.
"""

from __future__ import annotations

from crossrail._extras import needs

with needs(__name__, "'crossrail[triton]'"):
    import triton
    import triton.language as tl


@triton.jit(do_not_specialize=["given"])
def share_routes(
    shared,
    kept,
    indices,
    tokens,
    number,
    given,
    routes,
    stride,
    TOP_K: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """given: routes of indices and kept; routes: of the board."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = given
    if HAS_TOKENS:
        count = tl.minimum(tl.maximum(tl.load(tokens).to(tl.int64), 0), given)  # before it is multiplied
        end = tl.minimum(count * TOP_K, given)
    index = tl.load(indices + at, mask=at < end, other=-1).to(tl.int64)
    expert = tl.where((index < -0x80000000) | (index > 0x7FFFFFFF), 0x7FFFFFFF, index).to(tl.int32)
    tl.store(kept + at, expert, mask=at < given)
    parity = tl.load(number) & 1
    tl.store(shared + parity * stride + at, expert, mask=at < routes)


@triton.jit
def send_rows(
    rows_out,
    addresses,
    rooms,
    where,
    x,
    scales,
    kept,
    counts,
    slots,
    number,
    rows_out_odd,
    ranks,
    first,
    last,
    experts,
    experts_to_ranks,
    experts_per_rank,
    index,
    width,
    extra,
    stride,
    TOP_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    DP_SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each route and block of its row. [first, last): our experts. addresses, rooms: [2, ranks], [ranks],
    of memory.row_targets. experts_to_ranks: Own.ranks, which is read unless IS_EVEN. index: ours in our group
    of DP_SIZE.
    """
    route = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_round = tl.load(number)
    parity = of_round & 1
    expert = tl.load(kept + route)
    all_experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + all_experts, mask=all_experts < experts, other=0)
    goes = (expert >= 0) & (expert < experts) & (of_round >= 0)
    is_own = (expert >= first) & (expert < last)
    if IS_EVEN:
        rank = expert // experts_per_rank
        first_there = rank * experts_per_rank
    else:
        rank = tl.load(experts_to_ranks + 2 * expert, mask=goes, other=0)
        first_there = tl.load(experts_to_ranks + 2 * expert + 1, mask=goes, other=0)
    before = tl.sum(tl.where(all_experts < expert, count, 0), 0)
    before_rank = tl.sum(tl.where(all_experts < first_there, count, 0), 0)
    own = tl.sum(tl.where((all_experts >= first) & (all_experts < last), count, 0), 0)
    position = before + tl.load(slots + route, mask=goes, other=0)  # there are none of others
    row = position - before_rank
    far_row = tl.where(expert >= last, position - own, position)
    sends = goes
    if DP_SIZE > 1:
        if IS_EVEN:
            all_ranks = all_experts // experts_per_rank
        else:
            all_ranks = tl.load(experts_to_ranks + 2 * all_experts, mask=all_experts < experts, other=0)
        packed = (all_ranks % DP_SIZE == index) & ((all_experts < first) | (all_experts >= last))
        far_row = position - before + tl.sum(tl.where(packed & (all_experts < expert), count, 0), 0)
        sends = goes & (rank % DP_SIZE == index)
    token = (route // TOP_K).to(tl.int64)
    end = tl.where(goes, width + extra, 0)
    value = tl.load(x + token * width + at, mask=(at < width) & (at < end), other=0)
    value = value | tl.load(scales + token * extra + at - width, mask=(at >= width) & (at < end), other=0)
    address = tl.load(addresses + parity * ranks + rank, mask=goes, other=0)
    fits = row < tl.load(rooms + rank, mask=goes, other=0)  # nowhere, where there is no address
    direct_end = tl.where(sends & fits, stride, 0)
    # Experts that a token names twice may exceed the room: the counting side refuses them.
    far_end = tl.where(sends & (fits == 0) & (is_own == 0), stride, 0)
    tl.store(address.to(rows_out.dtype) + row.to(tl.int64) * stride + at, value, mask=at < direct_end)
    tl.store(rows_out + parity * rows_out_odd + far_row.to(tl.int64) * stride + at, value, mask=at < far_end)
    if tl.program_id(1) == 0:
        source = 2 * parity.to(tl.int32) + tl.where(is_own, 0, 1)
        tl.store(where + 2 * route, tl.where(goes, source, -1))
        tl.store(where + 2 * route + 1, tl.where(goes, tl.where(is_own, row, position), -1))


@triton.jit
def fetch_tables(
    near_numbers,
    near_moves,
    near_returns,
    numbers,
    moves,
    returns,
    expert_rows,
    expert_offsets,
    counts,
    offsets,
    number,
    board_stride,
    experts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the thread told, from the host's memory to ours, once for all who read it there. experts: of ours."""
    of_round = tl.load(number)
    board = (of_round & 1) * board_stride
    is_told = of_round >= 0
    known = tl.where(is_told, tl.load(numbers + board), 0)
    given = tl.where(is_told, tl.load(numbers + board + 1), 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    move = tl.load(moves + board + at, mask=at < 2 * known, other=0)
    place = tl.load(returns + board + at, mask=at < 3 * given, other=0)
    tl.store(near_moves + board + at, move, mask=at < 2 * known)
    tl.store(near_returns + board + at, place, mask=at < 3 * given)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        told = tl.where(is_told, experts, -1)
        rows = tl.load(expert_rows + board + expert, mask=expert < told, other=0)
        begin = tl.load(expert_offsets + board + expert, mask=expert <= told, other=0)
        tl.store(counts + expert, rows, mask=expert < experts)
        tl.store(offsets + expert, begin, mask=expert <= experts)
        tl.store(near_numbers + board, known)
        tl.store(near_numbers + board + 1, given)


@triton.jit
def take_rows(
    x,
    scales,
    rows_in,
    own_rows,
    numbers,
    moves,
    number,
    board_stride,
    rows_in_odd,
    own_odd,
    rows_in_count,
    own_count,
    outputs,
    width,
    extra,
    stride,
    BLOCK: tl.constexpr,
):
    """A program for each block of a row, and some of the moves."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_round = tl.load(number)
    parity = of_round & 1
    board = parity * board_stride
    count = tl.where(of_round >= 0, tl.load(numbers + board), 0)
    for move in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(moves + board + 2 * move)
        to = tl.load(moves + board + 2 * move + 1).to(tl.int64)
        is_own = source < 0
        row = tl.where(is_own, -1 - source, source).to(tl.int64)
        known = (row < tl.where(is_own, own_count, rows_in_count)) & (to >= 0) & (to < outputs)
        own_end = tl.where(known & is_own, width + extra, 0)
        far_end = tl.where(known & (is_own == 0), width + extra, 0)
        value = tl.load(own_rows + parity * own_odd + row * stride + at, mask=at < own_end, other=0)
        value = value | tl.load(rows_in + parity * rows_in_odd + row * stride + at, mask=at < far_end, other=0)
        end = tl.where(known, width + extra, 0)
        tl.store(x + to * width + at, value, mask=(at < width) & (at < end))
        tl.store(scales + to * extra + at - width, value, mask=(at >= width) & (at < end))


@triton.jit
def give_rows(
    addresses,
    rooms,
    y,
    numbers,
    returns,
    number,
    board_stride,
    targets,
    rows,
    width,
    BLOCK: tl.constexpr,
):
    """A program for each block of a row, and some of the returns. addresses, rooms: [2, targets], [targets], of
    memory.result_targets.
    """
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_round = tl.load(number)
    parity = of_round & 1
    board = parity * board_stride
    count = tl.where(of_round >= 0, tl.load(numbers + board + 1), 0)
    for place in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(returns + board + 3 * place).to(tl.int64)
        target = tl.load(returns + board + 3 * place + 1)
        to = tl.load(returns + board + 3 * place + 2).to(tl.int64)
        known = (row >= 0) & (row < rows) & (target >= 0) & (target < targets) & (to >= 0)
        known = known & (to < tl.load(rooms + target, mask=known, other=0))  # nowhere, where there is no address
        address = tl.load(addresses + parity * targets + target, mask=known, other=0)
        end = tl.where(known, width, 0)
        value = tl.load(y + row * width + at, mask=at < end, other=0)
        tl.store(address.to(y.dtype) + to * width + at, value, mask=at < end)
