"""`crossrail moe demo`: the experts of a Qwen3-MoE spread over processes, each with its own tokens, and a check.

This process runs the same model alone, as transformers has it, and compares what each rank gives: one MoE block in
float32 and in bfloat16, and in float32 also the logits of the whole model. All twice: the bits have to be the same.
"""

from __future__ import annotations

import secrets
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from crossrail.cli.child import Child, Children
from crossrail.cli.console import open_console
from crossrail.cli.group import require
from crossrail.cli.option_types import IntRange
from crossrail.cli.service import check_transport, transport_option
from crossrail.cli.tables import Fitted
from crossrail.cli.text import format_bytes
from crossrail.errors import CrossrailError

if TYPE_CHECKING:
    from crossrail.cli.moe.model import ModelSpec

_TIMEOUT_S = 240.0  # each rank imports torch and transformers first
# transformers sums experts in the order of their numbers, and in bfloat16 rounds after each.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@click.command()
@click.option("--ranks", default=4, show_default=True, type=IntRange(1, 64), help="Processes, each with a share.")
@click.option("--experts", default=14, show_default=True, type=IntRange(4, 1024), help="Experts of each layer.")
@click.option("--tokens", default=48, show_default=True, type=IntRange(1, 4096), help="Tokens of each sequence.")
@click.option("--seed", default=1, show_default=True, help="Seed of weights and tokens.")
@transport_option("shm")
def demo(ranks: int, experts: int, tokens: int, seed: int, transport: str) -> None:
    """Run a small Qwen3-MoE from transformers with its experts spread over processes, and compare it with one
    process.
    """
    check_transport(transport)
    require("moe demo", "moe", "torch", "transformers")
    from crossrail.cli.moe.model import ModelSpec

    console = open_console()
    with (
        tempfile.TemporaryDirectory(prefix="crossrail-moe-") as folder,
        Children([Child("crossrail.cli.moe.rank", f"rank {rank}") for rank in range(ranks)]) as crew,
    ):
        _meet(crew, transport)
        for dtype in _TOLERANCE:
            spec = ModelSpec(dtype=dtype, seed=seed, experts=experts, tokens=tokens)
            shares = crew.all("share", _TIMEOUT_S, spec=asdict(spec))
            found = {step: _run(crew, step, Path(folder)) for step in _steps(spec)}
            _show(spec, shares, found, console)
    console.print("[green]ok[/green]: equal to one process within the dtype, and the same bits twice")


def _steps(spec: ModelSpec) -> list[str]:
    """The comparisons. In bfloat16 the second layer's router may choose differently between equally good experts."""
    return ["block", "logits"] if spec.dtype == "float32" else ["block"]


def _meet(crew: Children, transport: str) -> None:
    run = secrets.token_hex(4)
    names = [{"name": f"moe-{run}-{rank}", "transport": transport} for rank in range(len(crew))]
    addresses = crew.each("open", names, _TIMEOUT_S)
    crew.all("meet", _TIMEOUT_S, addresses=addresses)


def _run(crew: Children, step: str, folder: Path) -> list[Any]:
    """Each rank's results. CrossrailError if its bits differ between two runs."""
    import torch

    times = []
    for time in range(2):
        files = [folder / f"{step}-{time}-{rank}.pt" for rank in range(len(crew))]
        crew.each(step, [{"file": str(file)} for file in files], _TIMEOUT_S)
        times.append([torch.load(file) for file in files])
    for rank, (first, second) in enumerate(zip(*times, strict=True)):
        if not torch.equal(first, second):
            raise CrossrailError(f"{step} of rank {rank} differs from one time to the other")
    return times[0]


def _show(spec: ModelSpec, shares: list[dict[str, int]], found: dict[str, list[Any]], console: Console) -> None:
    import torch

    whole = spec.model()
    own = whole.model.layers[0].mlp.experts
    nbytes = sum(tensor.nbytes for tensor in own.parameters())
    console.print(
        f"Qwen3-MoE of transformers in {spec.dtype}: {spec.layers} layers, {spec.experts} experts of "
        f"{format_bytes(nbytes // spec.experts)}, top {spec.top_k}, hidden {spec.hidden}; each rank has "
        f"{spec.max_tokens} tokens of its own"
    )
    table = Table(title="largest difference to one process, of the largest value")
    for column in ("rank", "experts", "kept", *found):
        table.add_column(column, justify="right", no_wrap=True)
    with torch.inference_mode():
        for rank, share in enumerate(shares):
            wanted = {
                "block": whole.model.layers[0].mlp(spec.hidden_states(rank)),
                "logits": whole(spec.token_ids(rank), use_cache=False).logits,
            }
            differences = [_difference(got[rank], wanted[step]) for step, got in found.items()]
            kept = f"{share['nbytes'] / nbytes:.0%}"
            table.add_row(str(rank), str(share["experts"]), kept, *(f"{each:.1e}" for each in differences))
            if max(differences) > _TOLERANCE[spec.dtype]:
                raise CrossrailError(
                    f"rank {rank} differs by {max(differences):.2g}, and {spec.dtype} allows {_TOLERANCE[spec.dtype]:g}"
                )
    console.print(Fitted(table))


def _difference(got: Any, wanted: Any) -> float:
    """The largest, as a part of the largest value wanted."""
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
