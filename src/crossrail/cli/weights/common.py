"""What the commands of `crossrail weights` share: models by name, spread over as many processes as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import gcd
from pathlib import Path

import click

from crossrail.cli.service import together
from crossrail.errors import UsageError
from crossrail.weights import Inventory
from crossrail.weights.inventory.models import CLUSTERS, MODELS, Cluster, inventories

_ranks = click.IntRange(max=1 << 16)  # each takes its time to describe

cluster_options = together(
    click.option("--trainers", type=_ranks, help="Number of trainers [default: as published for the model]."),
    click.option("--targets", type=_ranks, help="Inference ranks [default: as published for the model]."),
    click.option("--pipeline", type=int, help="Pipeline stages of the trainers."),
    click.option("--expert-parallel", type=int, help="Expert-parallel groups of a stage."),
    click.option("--dense-shard", type=int, help="Ranks over which all other parameters are sharded."),
    click.option("--target-experts", type=int, help="Inference ranks over which the experts are spread."),
    click.option("--layers", type=click.IntRange(1, 1000), help="Number of layers [default: all of the model's]."),
)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """What fails while this file is written names it: of a full disk Python names none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from None


def check_model(name: str) -> None:
    """UsageError for a model that is not known by name."""
    if name not in MODELS:
        raise UsageError(f"model {name!r} is not known; there are {', '.join(MODELS)}")


def sides_of(model: str, **given: int | None) -> tuple[list[Inventory], list[Inventory]]:
    """What all trainers and all targets hold. given: as cluster_options() has them."""
    shape, layers = MODELS[model], given.get("layers")
    if layers is not None:
        shape = replace(shape, layers=layers, dense_layers=min(shape.dense_layers, layers))
    return inventories(shape, cluster_of(model, **given))


def cluster_of(model: str, **given: int | None) -> Cluster:
    """The published one, with what was given instead; what was not given shrinks as far as it has to."""
    published = CLUSTERS[model]
    sizes = {name: value for name, value in given.items() if value is not None and name != "layers"}
    trainers, targets = sizes.get("trainers", published.trainers), sizes.get("targets", published.targets)
    pipeline = sizes.get("pipeline", gcd(published.pipeline, trainers))
    stage = max(trainers // max(pipeline, 1), 1)
    fitting = {
        "pipeline": pipeline,
        "expert_parallel": gcd(published.expert_parallel, stage),
        "dense_shard": gcd(published.dense_shard, stage),
        "target_experts": gcd(published.target_experts, targets),
    }
    return replace(published, **(fitting | sizes))
