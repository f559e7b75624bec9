"""`crossrail doctor`: finds what would make transfers slow, impossible or unsafe, on this host and towards others."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
from rich.text import Text

from crossrail._text import plain
from crossrail.cli.background import background_console
from crossrail.cli.console import in_one_piece, open_console
from crossrail.cli.json_output import is_alone, json_option, write_json
from crossrail.cli.option_types import FloatRange
from crossrail.cli.places import parse_place
from crossrail.doctor.host import Host
from crossrail.doctor.reach import wire
from crossrail.doctor.reach.listen import Listener
from crossrail.doctor.reach.measure import measure
from crossrail.doctor.reach.rails import Rail, local_rails
from crossrail.doctor.reach.show import show_matrix
from crossrail.doctor.reach.show import to_json as matrix_to_json
from crossrail.doctor.reach.verdict import judge
from crossrail.doctor.report import Report, run_checks, to_json, why_unknown
from crossrail.doctor.show import show_report
from crossrail.errors import UsageError

_PORT_MAX = 65535


def _version() -> str:
    """The package's version, read without the native module, which may not load."""
    try:
        return importlib.metadata.version("crossrail")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _meant(word: str) -> str:
    """A hint for a word that is not an option."""
    if not why_unknown(word):
        return f"{word} is a topic: crossrail doctor --only {word}"
    return (
        f"doctor looks at this machine. For the way to {plain(word)}: crossrail doctor --peer {plain(word)}, while "
        "crossrail doctor --listen runs there"
    )


def _is_file_name(path: Path) -> bool:
    """Whether it cannot be meant as a topic or a host, for which --json looks like a flag."""
    return path.suffix == ".json" or path.name != str(path) or path.exists()


def _topics(only: tuple[str, ...]) -> list[str]:
    names = [name.strip() for text in only for name in text.split(",") if name.strip()]
    if only and not names:
        raise UsageError("--only is empty: leave it out, or name topics")
    for name in names:
        if why := why_unknown(name):
            raise UsageError(f"--only {why}")
    return names


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, on a terminal, and removes it afterwards."""
    console = open_console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda line: status.update(Text(plain(line)))


def _examine(only: tuple[str, ...], *, json_path: Path | None, strict: bool) -> int:
    names = _topics(only)
    with _progress(is_alone(json_path)) as say:
        report = run_checks(Host(), names, lambda topic: say(f"looking at {topic}"))
    _print_report(report, json_path=json_path, strict=strict)
    return report.exit_status(strict=strict)


@in_one_piece()
def _print_report(report: Report, *, json_path: Path | None, strict: bool) -> None:
    if json_path is not None:
        write_json(json_path, to_json(report, strict=strict, version=_version()))
    if is_alone(json_path):
        return
    if report.findings:
        show_report(report, open_console())
    else:
        click.echo("nothing to say about that")


def _measure(target: str, seconds: float, *, json_path: Path | None, strict: bool) -> int:
    try:
        name, port = parse_place(target, default_port=wire.PORT)
    except UsageError as error:
        raise UsageError(f"--peer {error}") from None
    host, version = Host(), _version()
    with _progress(is_alone(json_path)) as say:
        matrix = measure(
            name, port, lambda loopback: local_rails(host, loopback=loopback), version, seconds=seconds, say=say
        )
    findings = judge(matrix, version)
    content = matrix_to_json(matrix, findings, strict=strict, version=version)
    write_json(json_path, content)
    if not is_alone(json_path):
        show_matrix(matrix, findings, open_console())
    return int(content["exit_status"])


def _listen(port: int, minutes: float) -> None:
    with background_console() as console:
        _answer(port, minutes, Host(), partial(console.print, markup=False, soft_wrap=True))


def _answer(port: int, minutes: float, host: Host, say: Callable[[str], None]) -> None:
    def rails_for(address: str) -> list[Rail]:
        return local_rails(host, loopback=address.startswith("127.") or address == "::1")

    with Listener(port, rails_for, _version(), say) as listener:
        say(f"listening on port {listener.port} for {minutes:g} minutes. On the other host run one of:")
        suffix = "" if listener.port == wire.PORT else f":{listener.port}"
        for rail in local_rails(host) or local_rails(host, loopback=True):
            address = f"[{rail.address}]" if rail.is_ipv6 and suffix else rail.address
            say(f"    crossrail doctor --peer {address}{suffix}    # {rail.interface}")
        click.echo("Anyone who reaches the port may measure. Ctrl-C ends it.", err=True)
        time.sleep(minutes * 60)
        say("time is up")


@click.command("doctor")
@json_option("it all (docs/doctor.md has the fields)")
@click.option(
    "--only",
    multiple=True,
    metavar="TOPIC",
    help="Only this topic or topic.check; several separated by commas, or repeated.",
)
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings too.")
@click.option("--peer", metavar="HOST[:PORT]", help="Measure the path to a host where `doctor --listen` runs.")
@click.option(
    "--listen",
    metavar="[PORT]",
    is_flag=False,
    flag_value=str(wire.PORT),
    help=f"Let `doctor --peer` on another host measure the path to this one. [default port: {wire.PORT}]",
)
@click.option(
    "--seconds",
    type=FloatRange(0.05, wire.MILLISECONDS_MAX / 1000),
    default=2.0,
    show_default=True,
    help="With --peer: length of each stream.",
)
@click.option(
    "--minutes", type=FloatRange(0.01, 1440), default=10.0, show_default=True, help="With --listen: how long."
)
@click.argument("words", nargs=-1, metavar="")
def command(
    json_path: Path | None,
    only: tuple[str, ...],
    strict: bool,
    peer: str | None,
    listen: str | None,
    seconds: float,
    minutes: float,
    words: tuple[str, ...],
) -> None:
    """Find what would make transfers slow, impossible or unsafe on this machine, and the commands that fix it.

    Changes nothing by itself. Topics: crossrail, libraries, rdma, gpu, network, tcp, limits, container, cpu,
    environment.

    Exit code: 0 no errors, 1 errors, also of a check itself (with --strict also warnings), 2 wrong usage.
    """
    if words:
        raise UsageError(_meant(words[0]))
    if json_path is not None and not is_alone(json_path) and not _is_file_name(json_path):
        raise UsageError(
            f"--json {json_path} would write to a file. {_meant(json_path.name)} (a file: {json_path}.json)"
        )
    if sum(chosen for chosen in (peer is not None, listen is not None, bool(only))) > 1:
        raise UsageError("--peer, --listen and --only exclude each other")
    if listen is not None:
        if not listen.isdecimal() or int(listen) > _PORT_MAX:
            raise UsageError(f"--listen {listen}: the port is a number from 0 (any) to {_PORT_MAX}")
        if json_path is not None:
            raise UsageError("--listen writes no JSON; the side with --peer has the figures")
        _listen(int(listen), minutes)
        return
    if peer is not None:
        status = _measure(peer, seconds, json_path=json_path, strict=strict)
    else:
        status = _examine(only, json_path=json_path, strict=strict)
    if status:
        raise click.exceptions.Exit(status)
