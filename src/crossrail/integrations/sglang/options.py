"""The backend's options, read from the environment because SGLang's command line has no place for them."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from crossrail.errors import UsageError
from crossrail.integrations.secret import shared_secret

OPTIONS_VARIABLE = "CROSSRAIL_SGLANG_OPTIONS"
# How many times prefiller_timeout_s it may take until a prefiller is shut out: asked for KV, asked to stop, and fenced.
_SHUTTING_OUT = 3
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]


class SglangOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in seconds; none has to be set.

    secret_file: its content, without whitespace around it, is the secret that all instances share; None: the value of
    CROSSRAIL_SECRET. One of the two must be there.
    transport, rails, port: as of crossrail.Engine, one engine a rank; a rank's port is `rails` further
    than that of the rank before it, 0: any.
    bootstrap_s: how long a prefiller's request waits for its decoder's pages. load_s: how long a decoder's waits for
    its KV, from when it has pages for it.
    prefiller_timeout_s: a prefiller that answers nothing for so long has failed. probe_s: how often it is asked
    meanwhile.
    register_s: how often a prefiller's rank tells its bootstrap server that it is there. A rank that was not heard for
    three times as long is forgotten.
    quiesce_s: how long SGLang's scheduler stands still, when it takes pages back, until nothing touches them; then it
    ends. At least three times prefiller_timeout_s (_SHUTTING_OUT).
    """

    secret_file: str | None = None
    transport: str = "auto"
    rails: Annotated[int, Meta(ge=1, le=16)] | list[str] = 1
    port: Annotated[int, Meta(ge=0, le=65000)] = 0
    bootstrap_s: Seconds = 300.0
    load_s: Seconds = 300.0
    prefiller_timeout_s: Seconds = 5.0
    probe_s: Seconds = 1.0
    register_s: Seconds = 2.0
    quiesce_s: Seconds = 30.0

    @classmethod
    def from_environment(cls) -> SglangOptions:
        """Raises UsageError, which names the option, for one that is unknown or out of bounds."""
        text = os.environ.get(OPTIONS_VARIABLE) or "{}"
        try:
            options = msgspec.json.decode(os.fsencode(text), type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{OPTIONS_VARIABLE}={text!r:.200}: {error}") from None
        if options.quiesce_s < _SHUTTING_OUT * options.prefiller_timeout_s:
            raise UsageError(
                f"{OPTIONS_VARIABLE}={text!r:.200}: quiesce_s ({options.quiesce_s:g}) must be at least {_SHUTTING_OUT} "
                f"times prefiller_timeout_s ({options.prefiller_timeout_s:g}): so long it may take to shut out a "
                "prefiller that does not answer, and a scheduler that waits for less ends its server"
            )
        return options

    def secret(self) -> bytes:
        """Raises UsageError when there is none: who can reach an instance's port could read prompts without it."""
        return shared_secret(self.secret_file, "crossrail", OPTIONS_VARIABLE)
