"""The class that verl creates in each trainer and rollout worker, under the name "crossrail"."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from crossrail import Engine
from crossrail._extras import needs
from crossrail._options import check_seconds
from crossrail.errors import UsageError
from crossrail.integrations.secret import shared_secret
from crossrail.integrations.verl.buckets import ALIGN
from crossrail.integrations.verl.pairing import Rank, Share, senders_of, targets_of
from crossrail.integrations.verl.waiting import Peers

with needs(__name__, "verl"):
    import torch
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.device import get_device_name

    from crossrail.integrations.verl.memory import SHARES_MAX, Memory
    from crossrail.integrations.verl.receiving import Receiver
    from crossrail.integrations.verl.sending import Sender

log = logging.getLogger("crossrail.verl")

_HEARTBEAT_S = 1.0


@CheckpointEngineRegistry.register("crossrail")
class CrossrailCheckpointEngine(CheckpointEngine):
    """One rank's. For each update verl calls prepare, init_process_group, send_weights or receive_weights, finalize.

    bucket_size: bytes, from verl's update_weights_bucket_megabytes; each rank has two while an update is under way.
    The rest is `checkpoint_engine.engine_kwargs.crossrail`. transport, rails: as of Engine. device: of the buckets,
    None: that of verl. rollout_dtype: what floating-point weights are sent as, a torch.dtype or its name, None: as they
    are. timeout_s: how long a rank may take for one bucket. secret_file: instead of CROSSRAIL_SECRET, which all ranks
    share. is_master: verl's other engines send from one rank; here all do, so it says nothing.
    Threads: verl's, one at a time; one event loop for each update.
    """

    def __init__(
        self,
        bucket_size: int,
        transport: str = "auto",
        rails: int | Sequence[str] = 1,
        device: str | None = None,
        rollout_dtype: torch.dtype | str | None = torch.bfloat16,
        timeout_s: float = 300.0,
        secret_file: str | None = None,
        is_master: bool = False,
    ) -> None:
        del is_master
        if bucket_size < ALIGN:
            raise UsageError(f"bucket_size is {bucket_size}, must be at least {ALIGN} bytes")
        check_seconds(timeout_s=timeout_s)
        self._bucket_bytes = bucket_size
        self._dtype = _dtype_of(rollout_dtype)
        self._device = get_device_name() if device is None else device
        self._timeout_s = timeout_s
        secret = shared_secret(secret_file, "verl's checkpoint engine", "engine_kwargs.crossrail")
        self._name = f"verl-{socket.gethostname()[:32]}-{os.getpid()}"
        gpu = self._device if self._device.startswith("cuda") else None
        self._engine = Engine(
            self._name, transport=transport, rails=rails, secret=secret, heartbeat_s=_HEARTBEAT_S, device=gpu
        )
        self._update: _Update | None = None

    # --- what verl calls ---

    def prepare(self) -> dict[str, Any]:
        """Allocates and registers the buckets. What it returns goes to build_topology."""
        self.finalize()
        self._update = update = _Update(self._engine, Memory(self._engine, self._bucket_bytes, self._device))
        return Rank(
            self._name,
            bytes(self._engine.address),
            bytes(update.memory.weights.descriptor),
            bytes(update.memory.tables.descriptor),
            (update.halves[0].imm, update.halves[1].imm),
            update.gave_up.imm,
            update.memory.bucket_bytes,
        )._asdict()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """In verl's controller: for each trainer rank its share and targets, for each rollout rank its senders."""
        trainers, rollouts = actor_wg_world_size, rollout_world_size
        if trainers > SHARES_MAX * max(rollouts, 1):
            raise UsageError(f"{trainers} trainer ranks to {rollouts} rollout ranks: at most {SHARES_MAX} share one")
        sizes = {each["bucket_bytes"] for each in metadata}
        if len(sizes) > 1:
            raise UsageError(f"update_weights_bucket_megabytes must be the same for trainer and rollout: {sizes} bytes")
        senders = [senders_of(rollout, trainers, rollouts) for rollout in range(rollouts)]
        targets = [targets_of(trainer, trainers, rollouts) for trainer in range(trainers)]
        shares = [Share(senders[of[0]].index(i), len(senders[of[0]])) for i, of in enumerate(targets) if of]
        return (
            {"ranks": [[metadata[trainers + i] for i in of] for of in targets], "share": [tuple(s) for s in shares]},
            {"ranks": [[metadata[i] for i in of] for of in senders], "share": [(0, 1)] * rollouts},
        )

    def init_process_group(self, ranks: Sequence[Mapping[str, Any]], share: Sequence[int]) -> None:
        """ranks: those at the other end. One that our engine had given up is looked for again: it lives, for it was
        prepared, and was frozen, or cut off.
        """
        if self._update is None:
            raise UsageError("init_process_group comes after prepare")
        self._update.ranks = [Rank(**rank) for rank in ranks]
        for rank in self._update.ranks:
            if self._engine.peer_state(rank.address) == "lost":
                self._engine.forget_peer(rank.address)
        self._update.share = Share(*share)

    def finalize(self) -> None:
        """Nobody writes into our buckets any more, and their memory is free. Idempotent."""
        if self._update is not None:
            update, self._update = self._update, None
            update.close()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """weights: (name, tensor) pairs, the same on all trainer ranks. Raises VerlUpdateFailed, what weights raise,
        and what else goes wrong on this rank; the rest of the weights was then asked for, with the other trainer ranks.

        Returns verl's metrics: seconds, bytes that this rank sent to all its targets.
        """
        update, peers = self._ready("send_weights")
        begun = time.monotonic()
        sender = Sender(self._engine, update.memory, peers, update.share, update.halves, self._dtype, global_steps)
        await sender.run(weights)
        took_s = time.monotonic() - begun
        log.info("step %s: %d bytes sent in %.2f s to %s", global_steps, sender.sent_bytes, took_s, peers.names)
        return {"crossrail/send_s": took_s, "crossrail/sent_bytes": float(sender.sent_bytes)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs in the trainer's order. A tensor is valid until the next pair is asked for: copy it.

        Raises VerlUpdateFailed.
        """
        update, peers = self._ready("receive_weights")
        is_over = False
        try:
            async for name, tensor in Receiver(update.memory, peers, update.halves, global_steps).run():
                yield name, tensor
            is_over = True
        finally:
            if not is_over:
                peers.give_up(update.memory.tables)

    def _ready(self, what: str) -> tuple[_Update, Peers]:
        update = self._update
        if update is None or not update.ranks:
            raise UsageError(f"{what} comes after prepare and init_process_group")
        return update, Peers(self._engine, update.ranks, update.gave_up, self._timeout_s)


class _Update:
    """The state of one update, so that late messages of a failed one are not taken for the next one's.

    halves, gave_up: see Rank. ranks: at the other end; share: our share of what is sent to them.
    """

    def __init__(self, engine: Engine, memory: Memory) -> None:
        self.memory = memory
        self.halves = (engine.alloc_imm(), engine.alloc_imm())
        self.gave_up = engine.alloc_imm()
        self.ranks: list[Rank] = []
        self.share = Share(0, 1)

    def close(self) -> None:
        self.memory.close()
        for counter in (*self.halves, self.gave_up):
            counter.release(force=True)


def _dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if (dtype is not None and not isinstance(dtype, torch.dtype)) or (isinstance(given, str) and dtype is None):
        raise UsageError(f"rollout_dtype is {given!r}, must be a dtype of torch, such as bfloat16, or None")
    return dtype
