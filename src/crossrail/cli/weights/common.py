"""Shared by the `crossrail weights` commands: models by name, spread over any number of processes, and mailboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import gcd
from typing import Any

import crossrail as xr
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire
from crossrail.errors import UsageError
from crossrail.weights import Inventory
from crossrail.weights.inventory.models import CLUSTERS, MODELS, Cluster, inventories
from crossrail.weights.services.messages import mailbox


@asynccontextmanager
async def opened_mailbox(name: str, secret: bytes, **options: Any) -> AsyncIterator[tuple[xr.Engine, Mailbox]]:
    """An engine, and control messages over it. options: of the engine."""
    with xr.Engine(name, secret=secret, **options) as engine:
        wire = EngineWire(engine)
        box = mailbox(wire, secret)
        box.start()
        try:
            yield engine, box
        finally:
            await box.close()
            wire.close()


def check_model(name: str) -> None:
    """UsageError for a model that is not known by name."""
    if name not in MODELS:
        raise UsageError(f"model {name!r} is not known; there are {', '.join(MODELS)}")


def sides_of(model: str, **given: int | None) -> tuple[list[Inventory], list[Inventory]]:
    """The inventories of all trainers and all targets. given: as for cluster_options()."""
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
