"""What the `crossrail kv` commands share: options, models by name, and running a service until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

import crossrail as xr
from crossrail._options import encoded
from crossrail.cli.service import read_secret, records_on_signal
from crossrail.control.deadlines import first_of
from crossrail.control.mailbox import Mailbox
from crossrail.control.mailbox import log as control_log
from crossrail.control.wire import EngineWire
from crossrail.errors import UsageError
from crossrail.kv.messages import mailbox
from crossrail.kv.model import Model, Tokenizer
from crossrail.kv.nodes.node import NodeOptions, log
from crossrail.kv.router.router import RouterOptions
from crossrail.kv.toy import ToyModel, ToyTokenizer
from crossrail.kv.transfer.layout import KvLayout

Options = TypeVar("Options", NodeOptions, RouterOptions)

_TOY_LAYOUT: dict[str, int | str | bool] = {
    "layers": 8, "pages": 512, "page_tokens": 16, "kv_heads": 4, "head_dim": 8, "dtype": "float16", "kind": "GQA",
    "order": "HND", "separate_kv": True, "tp": 1,
}  # fmt: skip
_FLAGS = {"true": True, "1": True, "false": False, "0": False}  # as options of other models have them
_EXAMPLES = ("qwen3", "llama", "deepseek")  # crossrail.kv.models.EXAMPLES, which imports transformers
_ENGINE_NAME_BYTES_MAX, _ITS_BEGINNING_BYTES = 64, 16


def chosen(defaults: Options, options: Mapping[str, Any]) -> Options:
    """The dataclass with the values given on the command line."""
    names = {field.name for field in fields(defaults)} & options.keys()
    return replace(defaults, **{name: options[name] for name in names})


class EndWanted(asyncio.Event):
    """Set by SIGTERM, SIGINT, or the end of standard input; in the last case is_deserted: our parent is gone, or done.

    at_once: set by a second signal, as when a user presses Ctrl-C again: nothing is waited for any more.
    """

    is_deserted = False

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

    def desert(self) -> None:
        self.is_deserted = True
        self.set()

    def on_signal(self) -> None:
        if self.is_set():
            self.at_once.set()
        self.set()


@dataclass(frozen=True)
class Service:
    """The parts of a router or node. end: set when the process is told to end."""

    engine: xr.Engine
    mailbox: Mailbox
    secret: bytes
    end: EndWanted


@contextlib.asynccontextmanager
async def opened(name: str, options: Mapping[str, Any]) -> AsyncIterator[Service]:
    """Opens what service_options say. Whoever uses the mailbox closes it first."""
    end = end_wanted(options["until_stdin_closes"])
    secret = read_secret(options["secret_file"])
    with (
        records_on_signal(),
        xr.Engine(
            engine_name(name),
            transport=options["transport"],
            rails=options["rails"],
            port=options["port"],
            secret=secret,
            peer_timeout_s=options["peer_timeout_s"],
        ) as engine,
    ):
        wire = EngineWire(engine)
        try:
            with logging_as(options["log_level"]):
                yield Service(engine, mailbox(wire, secret), secret, end)
        finally:
            wire.close()


@contextlib.contextmanager
def logging_as(level: str | None) -> Iterator[None]:
    """A service must say why it has no router, and whom it refuses: other commands only log errors.

    level: of --log-level, for the engine too; None: warnings of the service and of its control messages (such as those
    of another release), in Python's default format.
    """
    changed = (log, control_log) if level is None else (logging.getLogger("crossrail"),)
    before = [logger.level for logger in changed]
    for logger in changed:
        logger.setLevel((level or "warning").upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if level is not None:
        changed[0].addHandler(handler)
    try:
        yield
    finally:
        changed[0].removeHandler(handler)
        for logger, old in zip(changed, before, strict=True):
            logger.setLevel(old)


def engine_name(name: str) -> str:
    """A service's name, without its middle where it is too long for an engine's: a role stands first in it, and last
    the end of its host's name, by which pods of one deployment differ, and the process.
    """
    whole = encoded(name, "--name")
    if len(whole) <= _ENGINE_NAME_BYTES_MAX:
        return name
    first = whole[:_ITS_BEGINNING_BYTES].decode(errors="ignore")
    last = whole[_ITS_BEGINNING_BYTES + 3 - _ENGINE_NAME_BYTES_MAX :].decode(errors="ignore")
    return f"{first}...{last}"


def tell(words: str) -> None:
    """Prints a line to stdout. A service continues if it cannot be written: the reader is gone, as `head -1` in a pipe,
    or the disk is full.
    """
    try:
        click.echo(words)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            why = error.strerror or str(error)
            complain(f"warning: stdout cannot be written ({why}), it goes on without; it was to say: {words}")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # for later output, and what is left of this line
        os.close(nowhere)


def complain(words: str) -> None:
    """A line on stderr, if it can be written."""
    with contextlib.suppress(OSError):
        click.echo(words, err=True)


async def until_ended_or_refused(end: EndWanted, refused: asyncio.Future[None]) -> None:
    """Raises what somebody has against the service, as soon as that is known."""
    ended = asyncio.ensure_future(end.wait())
    both: list[asyncio.Future[Any]] = [ended, refused]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if refused.done():
        refused.result()


async def drained(who: str, drain: Callable[[float], Awaitable[bool]], timeout_s: float, end: EndWanted) -> None:
    """Waits for requests in progress, until a second signal comes, and says so. drain: as Node.drain."""
    tell(f"{who}: finishing its requests, then exiting; a second signal ends it at once")
    draining = asyncio.ensure_future(drain(timeout_s))
    hurrying = asyncio.ensure_future(end.at_once.wait())
    done = await first_of([draining, hurrying])
    has_ended = draining.result() if draining in done else None
    if has_ended is None:
        has_ended = await drain(0.0)
    if not has_ended:
        why = "when told to" if end.at_once.is_set() else f"after {timeout_s:g} s"
        complain(f"{who}: ended {why}, before all was finished")


@contextlib.contextmanager
def ends_when_told() -> Iterator[None]:
    """Around what may take minutes before the service serves anybody, such as to load a model: SIGTERM ends it with
    status 0, through the code that runs, which may have processes to end; SIGINT ends it as any command.
    """
    told: list[int] = []

    def end(number: int, _frame: object) -> None:
        told.append(number)
        raise SystemExit(0)

    handlers: dict[signal.Signals, Any] = {signal.SIGTERM: end, signal.SIGINT: signal.default_int_handler}
    heeded = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in heeded}
    try:
        yield
    except Exception:
        if told:  # some code has made something else of it, as imports do
            raise SystemExit(0) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_model(name: str, options: Mapping[str, str]) -> Model:
    """ "toy", an example's name, a checkpoint's directory, or "package.module:function".

    The function is called with the options as keywords and returns a Model.
    """
    if name == "toy":
        return _open_toy(dict(options))
    if ":" in name and not Path(name).is_dir():
        model = _made_by(name, options)
        if not isinstance(model, Model):
            raise UsageError(f"{name!r} returned {_kind_of(model)}, not a crossrail.kv.model.Model")
        return model
    if name not in _EXAMPLES and not Path(name).is_dir():
        raise UsageError(
            f"model {name!r} is not one of toy, {', '.join(_EXAMPLES)}, nor a directory, nor 'package.module:function'"
        )
    return _of_transformers("named").open_named(name, options)  # type: ignore[no-any-return]  # imported by name


def open_tokenizer(name: str) -> Tokenizer | None:
    """ "toy", "none", a checkpoint's directory, or "package.module:function", which returns a Tokenizer."""
    if name == "none":
        return None
    if name == "toy":
        return ToyTokenizer()
    if Path(name).is_dir():
        return _of_transformers("tokenizer").TextTokenizer(Path(name))  # type: ignore[no-any-return]  # as above
    tokenizer = _made_by(name, {})
    if not isinstance(tokenizer, Tokenizer):
        raise UsageError(f"{name!r} returned {_kind_of(tokenizer)}, not a crossrail.kv.model.Tokenizer")
    return tokenizer


def tokenizer_of(model: str) -> str:
    """The `--tokenizer` for a model, by its name: the examples' tokens are bytes, as the toy's are."""
    if not Path(model).is_dir():
        return "toy"
    return model if _of_transformers("tokenizer").has_tokenizer(Path(model)) else "none"


def _kind_of(value: object) -> str:
    return f"an object of type {type(value).__qualname__}"


def _made_by(name: str, options: Mapping[str, str]) -> Any:
    """The result of the function of this name. UsageError for whatever it raises: it is the user's own."""
    module_name, colon, function = name.partition(":")
    if not colon:
        raise UsageError(f"{name!r} is neither 'toy', nor a directory, nor 'package.module:function'")
    try:
        return getattr(importlib.import_module(module_name), function)(**options)
    except (ImportError, AttributeError, UsageError) as error:
        raise UsageError(f"{name!r}: {error}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name!r} raised {what}; `crossrail --debug kv ...` shows where") from error


def _of_transformers(module: str) -> Any:
    try:
        return importlib.import_module(f"crossrail.kv.models.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("crossrail"):
            raise
        raise UsageError(f"this model needs {error.name}: pip install 'crossrail[kv,transformers]'") from None


def _open_toy(options: dict[str, str]) -> ToyModel:
    try:
        seed = _toy_int("seed", options.pop("seed", "1"))
        token_us = float(options.pop("token_us", "0"))
        if not 0 <= token_us <= 1e6:
            raise ValueError(f"token_us={token_us:g} must be microseconds, 0 to 1e6")
        given = {key: _toy_value(key, text) for key, text in options.items()}
    except KeyError as error:
        known = ", ".join([*_TOY_LAYOUT, "seed", "token_us"])
        raise UsageError(f"the toy model has no option {error.args[0]!r}; there are {known}") from None
    except ValueError as error:
        raise UsageError(f"option of the toy model: {error}") from None
    return ToyModel(KvLayout(**(_TOY_LAYOUT | given)), seed, token_us / 1e6)  # type: ignore[arg-type]  # checked by KvLayout


def _toy_int(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{key}={text!r} must be a whole number") from None


def _toy_value(key: str, text: str) -> int | str | bool:
    """KeyError for no option, ValueError for no value of it."""
    kind = type(_TOY_LAYOUT[key])
    if kind is int:
        return _toy_int(key, text)
    if kind is not bool:
        return kind(text)
    if text.lower() not in _FLAGS:
        raise ValueError(f"{key}={text!r} must be true or false")
    return _FLAGS[text.lower()]


def parse_options(pairs: tuple[str, ...]) -> dict[str, str]:
    """key=value pairs."""
    if bad := next((pair for pair in pairs if "=" not in pair), None):
        raise UsageError(f"model option {bad!r} must be KEY=VALUE")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def end_wanted(until_stdin_closes: bool) -> EndWanted:
    """An event of the running loop that is set when the service is told to end."""
    loop = asyncio.get_running_loop()
    end = EndWanted()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.on_signal)
    if until_stdin_closes:

        def read() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                end.desert()

        loop.add_reader(0, read)
    return end
