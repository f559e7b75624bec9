"""The connector's options, from kv_connector_extra_config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from crossrail.errors import UsageError
from crossrail.integrations.ports import port_of_rank
from crossrail.integrations.secret import shared_secret

Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]


class VllmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in seconds; every one has a reason to differ from site to site, none has to be set.

    secret_file: its content, without whitespace around it, is the secret that all instances share; None: the value of
    CROSSRAIL_SECRET. One of the two must be there.
    transport, rails, port: as of crossrail.Engine, one engine a worker; a worker's port is `rails` further than
    that of the rank before it, 0: any.
    instance_file: where a producer writes what others have to know of it (one line), for proxies that ask decoders
    before a prompt is prefilled; "" : nowhere. With data parallelism each replica is an instance: of_replica().
    layerwise: KV leaves layer by layer, during the forward pass, to decoders that have asked by then. False: after it.
    lease_s: how long a prefilled prompt waits for a decoder that does not show itself. heartbeat_s: how often a
    decoder whose own blocks are all taken says that it is still going to come; less than a third of lease_s.
    load_s: how long a decoder waits for a prompt's KV, from when it has blocks for it; then the load has failed. And
    how long an instance whose blocks are all held for others does nothing, before it gives up a request that waits.
    producer_timeout_s: a producer that answers nothing for so long has failed. probe_s: how often it is asked
    meanwhile.
    watcher_poll_us: pause between looks at how many layers are computed, once this instance has prefilled for another.
    quiesce_s: how long a preemption waits for writes out of the blocks it takes, before it gives up the decoders that
    hold them up. idle_s: how long a step with nothing to compute waits for news; without it vLLM's loop would take a
    whole core while blocks wait to be freed.
    """

    secret_file: str | None = None
    transport: str = "auto"
    rails: Annotated[int, Meta(ge=1, le=16)] | list[str] = 1
    port: Annotated[int, Meta(ge=0, le=65000)] = 0
    instance_file: str = ""
    layerwise: bool = True
    lease_s: Seconds = 30.0
    heartbeat_s: Seconds = 5.0
    load_s: Seconds = 60.0
    producer_timeout_s: Seconds = 5.0
    probe_s: Seconds = 1.0
    watcher_poll_us: Annotated[float, Meta(ge=1.0, le=100_000.0)] = 200.0
    quiesce_s: Seconds = 10.0
    idle_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.002

    def __post_init__(self) -> None:
        if self.heartbeat_s * 3 > self.lease_s:
            raise UsageError(f"heartbeat_s={self.heartbeat_s:g} must be at most a third of lease_s={self.lease_s:g}")

    @classmethod
    def of(cls, extra_config: dict[str, Any]) -> VllmOptions:
        """Raises UsageError, which names the option, for one that is unknown or out of bounds."""
        if unknown := sorted(extra_config.keys() - set(cls.__struct_fields__)):
            known = ", ".join(cls.__struct_fields__)
            raise UsageError(f"kv_connector_extra_config has no option {', '.join(unknown)}: it has {known}")
        try:
            return msgspec.convert(extra_config, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"kv_connector_extra_config: {error}") from None

    def of_replica(self, index: int, ranks_before: int) -> VllmOptions:
        """Those of a data-parallel replica. ranks_before: workers of other replicas that take ports of its host first.

        The files of all but the first have `.dp` and its index behind their names.
        """
        file = f"{self.instance_file}.dp{index}" if self.instance_file and index else self.instance_file
        port = port_of_rank(self.port, ranks_before, self.rails)
        return msgspec.structs.replace(self, instance_file=file, port=port)

    def secret(self) -> bytes:
        """Raises UsageError when there is none: who can reach an instance's port could read prompts without it."""
        return shared_secret(self.secret_file, "CrossrailConnector", "kv_connector_extra_config")

    def write_instance(self, line: str) -> None:
        """Into instance_file, if there is to be one: whoever reads it meanwhile sees the old line, or the new.

        Raises UsageError when it cannot be written.
        """
        if not self.instance_file:
            return
        path = Path(self.instance_file)
        draft = path.with_name(f".{path.name}.new")
        try:
            draft.write_text(line + "\n")
            draft.replace(path)
        except OSError as error:
            raise UsageError(f"kv_connector_extra_config: instance_file {self.instance_file}: {error}") from None
