"""The entry point `crossrail` of `sglang.srt.plugins`, which SGLang calls at start in each of its processes.

SGLang's backends are a closed enum and a function over it. Both are extended through SGLang's own registry of hooks:
the enum by the lookup that Python's enums make for values they do not have.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from crossrail.errors import UsageError
from crossrail.integrations.interface import SGLANG
from crossrail.integrations.log_lines import mark_loggers

log = logging.getLogger("crossrail.sglang")

BACKEND = "crossrail"
UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Makes `--disaggregation-transfer-backend crossrail` known. Idempotent."""
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:  # of an SGLang without plug-ins: it must start all the same
        log.info("no transfer backend by crossrail: %s", error)
        return
    if BACKEND in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    mark_loggers()
    choices.add_disagg_transfer_backend_choices([BACKEND])
    HookRegistry.register(f"{UTILS}.TransferBackend._missing_", backend_of, HookType.AROUND)
    HookRegistry.register(f"{UTILS}.get_kv_class", class_of, HookType.AROUND)


def backend_of(original: Callable[..., Any], *given: Any) -> Any:
    """TransferBackend("crossrail"): a member that the enum did not have. given: at its end, the value."""
    if given[-1] != BACKEND:
        return original(given[-1])
    from sglang.srt.disaggregation.utils import TransferBackend

    _watch_front()
    return _member(TransferBackend)


def _watch_front() -> None:
    """The front of a server asks for its backend when it is made: by a decode server it is first seen here."""
    try:
        from crossrail.integrations.sglang.front import hook_front
    except ImportError as error:  # _classes() says what is missing
        log.debug("the front is not watched: %s", error)
    else:
        hook_front()


@functools.cache
def _member(kind: Any) -> Any:
    member = object.__new__(kind)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    return member


def class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """get_kv_class: ours for crossrail, SGLang's for all others."""
    if getattr(transfer_backend, "value", None) != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    return _classes()[class_type.value]


@functools.cache
def _classes() -> dict[str, type]:
    """The classes by SGLang's names of their kinds. Raises UsageError for an SGLang that they do not fit."""
    try:
        from crossrail.integrations.sglang import conn
    except ImportError as error:
        raise UsageError(SGLANG.refusal(str(error))) from error
    classes: dict[str, type] = {
        "manager": conn.CrossrailKVManager,
        "sender": conn.CrossrailKVSender,
        "receiver": conn.CrossrailKVReceiver,
        "bootstrap_server": conn.CrossrailKVBootstrapServer,
    }
    for ours in classes.values():
        SGLANG.check(ours, ours.__bases__[-1])
    return classes
