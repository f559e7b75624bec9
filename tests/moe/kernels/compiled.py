"""Compiles every kernel as TritonKernels launches it, for GPUs of the given compute capabilities; needs none.

    python -m tests.moe.kernels.compiled 80 90

In a process of its own: with TRITON_INTERPRET set, as our other tests have it, Triton compiles nothing. What is
launched is not run but compiled, down to machine code, once for each types and constants of its arguments.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossrail.moe.experts import ExpertSplit
from crossrail.moe.graph import triton as graph_launching
from crossrail.moe.graph import triton_code as graph_code
from crossrail.moe.graph.board import Tables
from crossrail.moe.graph.kernels import Own, Routes
from crossrail.moe.graph.memory import Rows, Targets
from crossrail.moe.kernels import triton as launching
from crossrail.moe.kernels import triton_code

TYPES = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TOKENS, TOP_K, EXPERTS = 4, 2, 3


class Compiler:
    """In the place of all kernels. compiled: name, types and constants of what was launched."""

    def __init__(self, capabilities: list[int]) -> None:
        self._capabilities = capabilities
        self.compiled: set[Any] = set()
        for module in (triton_code, graph_code):
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, triton.JITFunction) and name.endswith(("_rows", "_routes", "_tables")):
                    setattr(module, name, _Launched(self, kernel))

    def compile(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], fuses: bool) -> None:
        names = kernel.arg_names
        types = [TYPES[each.dtype] if isinstance(each, torch.Tensor) else "i32" for each in arguments]
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        assert list(signature) == names
        key = kernel.__name__, tuple(signature.items()), tuple(constants.items())
        if key in self.compiled:
            return
        self.compiled.add(key)
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        for capability in self._capabilities:
            made = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": fuses})
            assert made.asm["cubin"]


class _Launched:
    def __init__(self, compiler: Compiler, kernel: Any) -> None:
        self._compiler, self._kernel = compiler, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, enable_fp_fusion: bool = True, **constants: Any) -> None:
            self._compiler.compile(self._kernel, arguments, constants, enable_fp_fusion)

        return launch


def launch_all(kernels: launching.TritonKernels) -> None:
    """Each with all types, widths of elements, and options."""
    for dtype in (torch.int32, torch.int64):
        slots = torch.zeros((TOKENS, TOP_K), dtype=torch.int32)
        counts = torch.zeros(EXPERTS, dtype=torch.int32)
        kernels.count(torch.zeros((TOKENS, TOP_K), dtype=dtype), EXPERTS, counts, slots)
    for width in (8, 4, 2, 1):
        x, rows = (torch.zeros((TOKENS, n * width), dtype=torch.uint8) for n in (3, 8))
        for scales in (None, torch.zeros((TOKENS, width), dtype=torch.uint8)):
            for table in (None, torch.zeros(TOKENS, dtype=torch.int32)):
                kernels.pack(rows, x, scales, table)
            kernels.pull(x, scales, rows, torch.zeros((TOKENS, 2), dtype=torch.int32))
    where = torch.zeros((TOKENS, TOP_K, 2), dtype=torch.int32)
    for given, wanted in itertools.product(FLOATS, FLOATS):
        for weights, accumulate in itertools.product((None, torch.zeros((TOKENS, TOP_K))), (False, True)):
            out, source = torch.zeros((TOKENS, 16), dtype=wanted), torch.zeros((5, 16), dtype=given)
            kernels.reduce(out, [source], where, weights, accumulate)
    for dtype in FLOATS:
        codes, scales = kernels.quantize(torch.zeros((TOKENS, 256), dtype=dtype))
        kernels.dequantize(codes, scales, dtype=str(dtype).removeprefix("torch."))


def launch_rounds(kernels: graph_launching.TritonGraphKernels) -> None:
    """Those of GraphAllToAll, likewise."""
    numbers = torch.zeros(64, dtype=torch.int32)
    tables = Tables(numbers, numbers, numbers, numbers, numbers)
    board: Any = SimpleNamespace(
        tables=tables, near=tables, routes=numbers, stride=64, routes_max=TOKENS * TOP_K, rows_max=8, returns_max=8
    )
    number = torch.zeros(1, dtype=torch.int64)
    kept, slots = (torch.zeros((TOKENS, TOP_K), dtype=torch.int32) for _ in range(2))
    routes = Routes(kept, torch.zeros((TOKENS, TOP_K, 2), dtype=torch.int32), numbers[:EXPERTS], slots)
    for dtype in (torch.int32, torch.int64):
        for tokens in (None, number, numbers[:1]):
            kernels.share(board, kept, torch.zeros((TOKENS, TOP_K), dtype=dtype), tokens, number)
    for width in (8, 4, 2, 1):
        rows = Rows(torch.zeros(16 * 8 * width, dtype=torch.uint8), 8, 8 * width, 64 * width)
        memory: Any = SimpleNamespace(
            **dict.fromkeys(("rows_in", "rows_out", "results_in", "results_out", "own_rows", "own_results"), rows),
            **dict.fromkeys(("row_targets", "result_targets"), Targets.of([rows, None, rows], "cpu")),
        )
        x = torch.zeros((TOKENS, 3 * width), dtype=torch.uint8)
        for scales in (None, torch.zeros((TOKENS, width), dtype=torch.uint8)):
            for split, dp_size in itertools.product(((2, 1), (1, 2)), (1, 2)):
                own = Own.of(ExpertSplit(split), 0, dp_size, "cpu")
                kernels.send(memory, own, x, scales, routes, number)
            kernels.take(memory, board, x, scales, numbers[:2], numbers[:3], number)
        kernels.give(memory, board, torch.zeros((TOKENS, 8 * width), dtype=torch.uint8), number)
    for given, wanted in itertools.product(FLOATS, FLOATS):
        summed: Any = SimpleNamespace(sources=[torch.zeros((5, 16), dtype=given)])
        out = torch.zeros((TOKENS, 16), dtype=wanted)
        for accumulate in (False, True):
            kernels.sum(summed, out, routes.where, torch.zeros((TOKENS, TOP_K)), accumulate, number)


def main() -> None:
    torch.cuda.is_available = lambda: True
    compiler = Compiler([int(capability) for capability in sys.argv[1:]])
    launch_all(launching.TritonKernels(checked=False))
    launch_rounds(graph_launching.TritonGraphKernels())
    print(*sorted({name for name, _, _ in compiler.compiled}), len(compiler.compiled))


if __name__ == "__main__":
    main()
