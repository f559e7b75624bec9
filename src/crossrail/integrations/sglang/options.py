"""The backend's options, read from the environment because SGLang's command line has no place for them.

What SGLang's own variables say of its other backends holds for this one, unless an option says otherwise.
"""

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
_SECONDS_MAX = 86400.0
Seconds = Annotated[float, Meta(gt=0.0, le=_SECONDS_MAX)]

_SGLANG = "SGLANG_DISAGGREGATION_"
# SGLang's defaults and least values: every INTERVAL it asks whether the prefiller lives, FAILURE misses are its end.
_INTERVAL, _INTERVAL_S, _INTERVAL_MIN_S = f"{_SGLANG}HEARTBEAT_INTERVAL", 5.0, 2.0
_FAILURE, _FAILURES, _FAILURES_MIN = f"{_SGLANG}HEARTBEAT_MAX_FAILURE", 2.0, 1.0


class SglangOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times in seconds; none has to be set. Those that are not are as in sglang_times(), else the defaults here.

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
    other_half_s: how long a decoder waits for a room that has not come to the prefill server at all, and a prefiller
    for one that no decode server has.
    quiesce_s: how long SGLang's scheduler waits, when it takes pages back, until nothing touches them; then it
    ends. At least three times prefiller_timeout_s (_SHUTTING_OUT), and by default so long if that is longer.
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
    other_half_s: Seconds = 30.0
    quiesce_s: Seconds = 30.0

    @classmethod
    def from_environment(cls) -> SglangOptions:
        """Raises UsageError, which names the option or variable, for one that is unknown or out of bounds."""
        text = os.environ.get(OPTIONS_VARIABLE) or "{}"
        try:
            options = msgspec.json.decode(os.fsencode(text), type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{OPTIONS_VARIABLE}={text!r:.200}: {error}") from None
        given = msgspec.json.decode(os.fsencode(text))
        options = msgspec.structs.replace(
            options, **{name: value for name, value in sglang_times().items() if name not in given}
        )
        if "quiesce_s" not in given:
            longest_s = max(options.quiesce_s, _SHUTTING_OUT * options.prefiller_timeout_s)
            options = msgspec.structs.replace(options, quiesce_s=longest_s)
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


def sglang_times() -> dict[str, float]:
    """Options by SGLang's own variables, those that are set. Raises UsageError for one that is no time.

    A day is the longest: who writes more means for ever.
    """
    times = {}
    for option, variable in (("bootstrap_s", "BOOTSTRAP_TIMEOUT"), ("load_s", "WAITING_TIMEOUT")):
        if (said := _number(_SGLANG + variable)) is not None:
            times[option] = said
    interval_s, failures = _number(_INTERVAL), _number(_FAILURE)
    if interval_s is not None or failures is not None:
        interval_s = max(_INTERVAL_S if interval_s is None else interval_s, _INTERVAL_MIN_S)
        failures = max(_FAILURES if failures is None else failures, _FAILURES_MIN)
        times["prefiller_timeout_s"] = interval_s * failures
    return {option: min(value, _SECONDS_MAX) for option, value in times.items()}


def _number(variable: str) -> float | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0.0:
        raise UsageError(f"{variable}={text!r:.80} must be a number above 0")
    return value
