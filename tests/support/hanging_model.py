"""For `--model`: a toy that hangs in each call and, like a thread, does not release its pages when cancelled."""

import asyncio
import contextlib
import sys
from typing import Any, NoReturn

from crossrail.cli.kv.common import open_model
from crossrail.kv.model import Model


def make(**options: str) -> Model:
    model: Any = open_model("toy", options)
    model.prefill = model.step = _hang
    return model  # type: ignore[no-any-return]  # it is one


async def _hang(*_: object) -> NoReturn:
    print("a call of the model hangs", file=sys.stderr, flush=True)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
