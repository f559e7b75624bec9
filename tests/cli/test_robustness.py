"""Every command, used wrongly or in bad surroundings: one line that says so, the right status, no traceback."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from crossrail.cli import memory
from crossrail.cli.main import COMMANDS, main
from crossrail.errors import CrossrailError, PeerLost, UsageError
from tests.cli.leaves import groups_and_leaves, with_arguments
from tests.support.limits import PROGRAM_S, eventually

EVERY = list(groups_and_leaves())
NAMES = [" ".join(words) or "crossrail" for words, _ in EVERY]
ESCAPE = "\x1b["


def run(*words: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [str(word) for word in words])


def refused(result: Result) -> str:
    """The one line with the error."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and not result.stdout, result.output
    return lines[0]


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["trace", "/no\nne"], "/no", "[see crossrail trace --help]"),
        (["bench", "--bad"], "No such option", "[see crossrail bench --help]"),
        (["kv", "nope"], "No such command 'nope'", "[see crossrail kv --help]"),
        (["errors"], "No such command 'errors'; did you mean 'error'?", "[see crossrail --help]"),
        (["kv", "prefil"], "No such command 'prefil'; did you mean 'prefiller'?", "[see crossrail kv --help]"),
        (["bench", "rum"], "No such command 'rum'; did you mean 'run'?", "[see crossrail bench --help]"),
        (["qqq"], "No such command 'qqq' [", "[see crossrail --help]"),
        (["--nope"], "No such option", "[see crossrail --help]"),
    ],
    ids=["argument", "option", "command", "meant", "meant of kv", "meant of bench", "not meant", "option of crossrail"],
)
def test_what_click_refuses_is_one_line_that_says_where_to_read_on(words: list[str], said: str, hint: str) -> None:
    line = refused(CliRunner().invoke(main, words, prog_name="crossrail"))
    assert said in line and line.endswith(hint)


def typed() -> Iterator[Any]:
    """Options and arguments that do not take just any word."""
    for words, command in EVERY:
        for parameter in command.params:
            takes_words = isinstance(parameter.type, (click.types.StringParamType, click.types.BoolParamType))
            if not takes_words and getattr(parameter, "is_flag", False) is False:
                yield pytest.param(words, command, parameter, id=" ".join([*words, parameter.opts[0]]))


@pytest.mark.parametrize(("words", "command", "parameter"), list(typed()))
def test_value_of_the_wrong_type(words: list[str], command: click.Command, parameter: click.Parameter) -> None:
    """Of a path: one that cannot be."""
    junk = "/dev/null/file" if "path" in parameter.type.name or isinstance(parameter.type, click.Path) else "j,u,n,k?"
    given = (
        [junk] if isinstance(parameter, click.Argument) else [*with_arguments(command), f"{parameter.opts[0]}={junk}"]
    )
    assert refused(run(*words, *given))


def of_type(kind: type[click.ParamType] | str) -> Iterator[Any]:
    """Options of a type, or of one whose name is that."""
    for words, command in EVERY:
        for parameter in command.params:
            if parameter.type.name == kind if isinstance(kind, str) else isinstance(parameter.type, kind):
                yield pytest.param(words, command, parameter, id=" ".join([*words, parameter.opts[0]]))


@pytest.mark.parametrize(("words", "command", "parameter"), list(of_type(click.types.FloatParamType)))
def test_number_that_is_none(words: list[str], command: click.Command, parameter: click.Parameter) -> None:
    """NaN is within all bounds, and no deadline ever passes."""
    assert "nan" in refused(run(*words, *with_arguments(command), f"{parameter.opts[0]}=nan"))


@pytest.mark.parametrize(("words", "command", "parameter"), list(of_type("size")))
def test_size_without_end(words: list[str], command: click.Command, parameter: click.Parameter) -> None:
    assert "is outside" in refused(run(*words, *with_arguments(command), f"{parameter.opts[0]}={'9' * 400}"))


@pytest.mark.parametrize(("words", "command"), EVERY, ids=NAMES)
def test_option_that_does_not_exist(words: list[str], command: click.Command) -> None:
    assert "--nonsense" in refused(run(*words, *with_arguments(command), "--nonsense"))


@pytest.mark.parametrize(("words", "command"), EVERY, ids=NAMES)
def test_word_without_end_is_clipped(words: list[str], command: click.Command) -> None:
    """The error says what is wrong with it, and does not fill the screen."""
    text = refused(run(*words, *with_arguments(command), "--" + "x" * 5000))
    assert "xxx...xxx" in text and len(text) < 400


@pytest.mark.parametrize(
    "words",
    [
        ["push", __file__, "tcp://LONG:1/"],
        ["explain", "tcp://LONG:1"],
        ["bench", "run", "LONG"],
        ["bench", "serve", "--bind=LONG"],
    ],
    ids=["push", "explain", "bench run", "bench serve"],
)
def test_host_of_a_name_that_none_can_have(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", "of this test")
    text = refused(run(*(word.replace("LONG", "x" * 5000) for word in words)))
    assert "is not the name of a host" in text and len(text) < 400


def test_demo_leaves_nothing_where_it_runs(tmp_path: Path) -> None:
    words = ["kv", "demo", "--prompt-tokens=64", "--max-tokens=2", "--prefillers=1", "--token-us=0"]
    with started(*words, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        output, errors = process.communicate(timeout=PROGRAM_S)
    assert process.returncode == 0 and "ok: 2 tokens" in output, errors
    assert not list(tmp_path.iterdir())


WITHOUT = """
import sys
from crossrail.cli.main import main
sys.modules["MODULE"] = None
main(prog_name="crossrail")
"""


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("aiohttp", "kv demo", "kv"),
        ("aiohttp", "kv router", "kv"),
        ("torch", "moe demo", "moe"),
        ("transformers", "weights rl", "weights"),
    ],
)
def test_extra_that_is_not_installed(module: str, words: str, extra: str) -> None:
    done = without(module, *words.split())
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(rf"error: crossrail .* needs .*: pip install 'crossrail\[{extra}\]' \[.*\]\n", done.stderr)


def test_completion_where_an_extra_is_not_installed() -> None:
    asked = {"_CROSSRAIL_COMPLETE": "bash_complete", "COMP_WORDS": "crossrail kv r", "COMP_CWORD": "2"}
    done = without("aiohttp", **asked)
    assert (done.stdout, done.stderr) == ("plain,router\n", "")


OLD_CLICK = """
import click.exceptions
import click
del click.exceptions.NoArgsIsHelpError  # which came with 8.2
from crossrail.cli.main import main
main()
"""


@pytest.mark.parametrize(("words", "status", "told"), [(["--version"], 0, "crossrail"), (["nonsense"], 2, "error: ")])
def test_click_of_before_its_error_for_help(words: list[str], status: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OLD_CLICK, *words], capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert done.returncode == status
    assert told in done.stdout + done.stderr and "Error:" not in done.stdout + done.stderr


def without(module: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`crossrail WORDS` where that module cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.replace("MODULE", module), *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ | environment, timeout=PROGRAM_S,
    )  # fmt: skip


@pytest.mark.parametrize(("words", "command"), EVERY, ids=NAMES)
def test_help_on_a_narrow_terminal_without_colour(words: list[str], command: click.Command) -> None:
    result = run(*words, "--help", COLUMNS="20", NO_COLOR="1", TERM="dumb")
    assert result.exit_code == 0 and not result.stderr
    assert "Usage:" in result.output and ESCAPE not in result.output


@pytest.mark.parametrize(("words", "command"), EVERY, ids=NAMES)
def test_each_option_says_what_it_is(words: list[str], command: click.Command) -> None:
    """And not its default alone."""
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    assert [one.opts for one in options if not one.help or one.help.startswith("[")] == [], words


@pytest.mark.parametrize(("words", "command"), EVERY, ids=NAMES)
def test_help_cuts_no_sentence_and_names_no_function_of_ours(words: list[str], command: click.Command) -> None:
    text = run(*words, "--help", COLUMNS="80").output
    _, _, listed = text.partition("Commands:")
    assert "..." not in listed
    assert not re.search(r" _[A-Z_]+", text)


# Those that do something at once, and nothing that stays.
QUICK = [
    ["topo"],
    ["topo", "--json"],
    ["doctor", "--only", "limits", "--json"],
    ["sim", "--list"],
    ["--help"],
    ["kv", "--help"],
]


def started(*words: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "crossrail", *words]
    environment = os.environ | {"COLUMNS": "30", "NO_COLOR": "1"}
    given = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": environment} | options
    return subprocess.Popen(command, **given)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_reader_of_the_output_is_gone(words: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with started(*words, stdout=write_end) as process:
        os.close(write_end)
        _, errors = process.communicate(timeout=PROGRAM_S)
    assert (process.returncode, errors) == (1, "")


AT_ONCE = [
    ["topo"],
    ["topo", "--json"],
    ["doctor", "--only", "limits"],
    ["bench", "--list"],
    ["sim", "--list"],
    ["error"],
]


@pytest.mark.parametrize("words", AT_ONCE, ids=" ".join)
def test_reader_that_takes_the_beginning_only_changes_no_exit_status(words: list[str]) -> None:
    """As `| head -1`, with pipefail."""
    with started(*words, stdout=subprocess.PIPE) as process:
        process.communicate(timeout=PROGRAM_S)
    with started(*words, stdout=subprocess.PIPE) as beheaded:
        assert beheaded.stdout and os.read(beheaded.stdout.fileno(), 1)
        beheaded.stdout.close()
        errors = beheaded.stderr.read() if beheaded.stderr else ""
        beheaded.wait(PROGRAM_S)
    assert (beheaded.returncode, errors) == (process.returncode, "")


def test_demo_on_a_narrow_terminal_cuts_nothing_off() -> None:
    command = [sys.executable, "-m", "crossrail", "demo", "--rounds=1"]
    environment = os.environ | {"COLUMNS": "20"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PROGRAM_S, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 20
    assert re.search(r"SHA-256\n  ok\s+[0-9a-f]{18}", done.stdout), done.stdout


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_output_on_a_narrow_terminal_without_colour(words: list[str]) -> None:
    with started(*words, stdout=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=PROGRAM_S)
    assert process.returncode in (0, 1) and "Traceback" not in errors  # doctor may have found something
    assert output and ESCAPE not in output + errors


@pytest.mark.parametrize("words", [*QUICK, ["demo", "FILE", "--rounds=1"]], ids=" ".join)
def test_output_that_takes_ascii_alone(words: list[str], tmp_path: Path) -> None:
    """As in a container without a locale; names of files need not be text at all."""
    file = tmp_path / os.fsdecode(b"raw\xff")
    file.write_bytes(bytes(100_000))
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "crossrail", *(str(file) if word == "FILE" else word for word in words)],
        stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=PROGRAM_S,
    )  # fmt: skip
    assert done.returncode in (0, 1) and b"error" not in done.stderr and b"Traceback" not in done.stderr, done.stderr
    assert done.stdout.decode("ascii")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["topo", "--help"], ["demo", "--rounds=1"], *AT_ONCE], ids=" ".join
)
def test_output_that_is_full(words: list[str], unbuffered: str) -> None:
    """Images of containers ask for unbuffered output."""
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full, started(*words, stdout=full, env=environment) as process:
        _, errors = process.communicate(timeout=PROGRAM_S)
    assert (process.returncode, errors) == (1, "error: standard output: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_other_file_that_is_full_is_not_taken_for_the_output(unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with started(
        "sim", "--scenario=pair", "--seed=1", "--log=/dev/full", stdout=subprocess.PIPE, env=environment
    ) as process:
        _, errors = process.communicate(timeout=PROGRAM_S)
    assert (process.returncode, errors) == (1, "error: /dev/full: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_error_of_a_command_that_printed_nothing_is_not_that_the_output_is_full(unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full, started("topo", "--root=/nowhere", stdout=full, env=environment) as process:
        _, errors = process.communicate(timeout=PROGRAM_S)
    assert (process.returncode, errors.split(" [")[0]) == (2, "error: --root /nowhere is not a directory")


@pytest.mark.parametrize("words", [["serve", "--once"], ["kv", "sim", "--layers=1", "--json=x.json"]], ids=" ".join)
def test_directory_that_was_removed_is_told(words: list[str], tmp_path: Path) -> None:
    """Under a shell that is still in it."""
    command = f"rmdir {tmp_path} && exec {sys.executable} -m crossrail {' '.join(words)}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROGRAM_S
    )
    said = "error: the current directory was removed: No such file or directory; cd to one that is there\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_output_that_is_closed() -> None:
    command = f"exec {sys.executable} -m crossrail topo >&-"
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=PROGRAM_S)
    assert (done.returncode, done.stderr) == (0, b"")


def write_checkpoint(folder: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


COUNTS = [
    "kv demo --prefillers", "kv demo --prompt-tokens", "weights demo --versions", "weights demo --trainers",
    "weights demo --mib", "weights bench --rounds", "weights bench --targets",
]  # fmt: skip


@pytest.mark.parametrize("option", COUNTS)
@pytest.mark.parametrize("count", [-1, 0, 10**20])
def test_count_that_makes_no_sense(option: str, count: int) -> None:
    """'ok: -1 versions, all bits equal' is no answer."""
    assert "is not in the range" in refused(run(*option.split()[:-1], f"{option.split()[-1]}={count}"))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at, on all addresses."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--listen=PORT", "--dir=."],
        ["doctor", "--listen=PORT"],
        ["kv", "router", "--listen=127.0.0.1:PORT"],
        ["kv", "router", "--port=PORT"],
        ["bench", "serve", "--bind=127.0.0.1:PORT", "--transport=shm"],
        ["weights", "load", "model.safetensors", "--targets=1", "--port=PORT"],
    ],
    ids=" ".join,
)
def test_port_is_taken(words: list[str], taken: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "CROSSRAIL_SECRET": "of this test"}
    done = subprocess.run(
        [sys.executable, "-m", "crossrail", *(word.replace("PORT", str(taken)) for word in words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=PROGRAM_S,
    )
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr
    assert str(taken) in errors[0] and re.search(r"in use|taken|errno 98", errors[0])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--dir=."],
        ["kv", "router", "--listen=127.0.0.1:0"],
        ["kv", "prefiller", "--router=http://127.0.0.1:1"],
        ["bench", "serve", "--bind=127.0.0.1:0", "--transport=shm"],
        ["weights", "load", "model.safetensors", "--targets=1"],
    ],
    ids=" ".join,
)
def test_service_writes_a_flight_recording_when_asked_by_a_signal(words: list[str], tmp_path: Path) -> None:
    """And goes on. Whoever follows docs/flight-recorder.md would else kill it."""
    write_checkpoint(tmp_path)
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "CROSSRAIL_SECRET": "of this test", "CROSSRAIL_DUMP_DIR": "."}

    def recordings() -> list[Path]:
        process.send_signal(signal.SIGUSR2)
        return list(tmp_path.glob("crossrail-*.flight"))

    with started(*words, stdout=subprocess.PIPE, cwd=tmp_path, env=os.environ | environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            eventually(recordings, "the signal has one written")  # not before there is an engine
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PROGRAM_S)
        finally:
            process.kill()
    assert process.returncode in (0, 130) and "flight recorder of engine" in errors


@pytest.mark.parametrize(
    "words", [["trace", "FILE"], ["weights", "show", "FILE"], ["bench", "compare", "FILE", "FILE"]], ids=" ".join
)
@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"{]" * 100], ids=["empty", "zeros", "text"])
def test_file_with_something_else_in_it(words: list[str], content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    result = run(*(str(file) if word == "FILE" else word for word in words))
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1, result.stderr


ENDLESS = [
    ["trace", "FILE"],
    ["bench", "compare", "FILE", "FILE"],
    ["bench", "--quick", "--only=sim", "--compare=FILE"],
    ["bench", "run", "127.0.0.1:1", "--secret-file=FILE"],
    ["bench", "serve", "--bind=127.0.0.1:0", "--secret-file=FILE"],
    ["kv", "router", "--secret-file=FILE"],
    ["weights", "load", "model.safetensors", "--secret-file=FILE"],
    ["weights", "plan", "--inventory=FILE"],
]


@pytest.mark.parametrize("words", ENDLESS, ids=" ".join)
def test_file_without_end_is_refused(words: list[str], tmp_path: Path) -> None:
    """It would take all memory first."""
    write_checkpoint(tmp_path)
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
    start = limit + "from crossrail.cli.main import main; main(prog_name='crossrail')"
    done = subprocess.run(
        [sys.executable, "-c", start, *(word.replace("FILE", "/dev/zero") for word in words)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path, timeout=PROGRAM_S,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "/dev/zero has more than" in errors[0]


@pytest.mark.parametrize("words", [["bench", "run", "h:1"], ["bench", "serve"], ["kv", "router"]], ids=" ".join)
def test_empty_secret_of_a_file_is_refused(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    assert f"--secret-file {tmp_path / 'empty'} is empty" in refused(run(*words, "--secret-file", tmp_path / "empty"))


@pytest.mark.parametrize("words", [["bench"], ["bench", "peers"]], ids=" ".join)
def test_more_memory_than_there_is(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 30)
    assert "1.0 GiB are free; make the pools smaller with --pool-bytes" in refused(run(*words, "--pool-bytes=1G"))


@pytest.mark.parametrize(
    "words",
    [["trace", "FILE"], ["weights", "show", "FILE"], ["push", "FILE", "inbox:"], ["bench", "compare", "FILE", "FILE"]],
    ids=" ".join,
)
def test_file_that_may_not_be_read(words: list[str], tmp_path: Path) -> None:
    """Root gives up what lets it read everything."""
    file = tmp_path / "file"
    file.write_bytes(b"secret")
    file.chmod(0)
    script = (
        "import ctypes, os, sys\n"
        "for dac_override_and_read_search in (1, 2):\n"
        "    ctypes.CDLL(None).prctl(24, dac_override_and_read_search, 0, 0, 0)  # PR_CAPBSET_DROP\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'crossrail', *sys.argv[1:]])\n"
    )
    given = [str(file) if word == "FILE" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-c", script, *given],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert done.returncode in (1, 2) and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search("not readable|permission", done.stderr, re.IGNORECASE)


class Raises(click.Command):
    """A command that ends by an exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("fails", callback=self.fail_so)
        self._error = error

    def fail_so(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("pages: -1"), 2, "error: pages: -1 [more: crossrail error usage-error]"),
        (PeerLost("gone"), 1, "error: gone [more: crossrail error peer-lost]"),
        (CrossrailError("so"), 1, "error: so"),
        (PeerLost("'a\x1b]0;x\x07' is gone"), 1, "error: 'a?]0;x?' is gone [more: crossrail error peer-lost]"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied"),
        (
            OSError(24, "Too many open files"),
            1,
            "error: Too many open files; raise the limit on open files (ulimit -n)",
        ),
        (MemoryError("std::bad_alloc"), 1, "error: out of memory; free some, or raise the limit on address space"),
        (RuntimeError("can't start new thread"), 1, "error: can't start new thread; raise the limit on processes"),
        (RuntimeError("x"), 1, "error: a mistake in crossrail, RuntimeError: x; "),
        (KeyError("x"), 1, "error: a mistake in crossrail, KeyError: 'x'; `crossrail --debug ...` shows where, "),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_becomes_of_an_exception(
    error: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "fails", ("raising:command", "Fails."))
    module = type(sys)("crossrail.cli.raising")
    module.command = Raises(error)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "crossrail.cli.raising", module)

    plain = run("fails")
    assert plain.exit_code == status
    assert plain.stderr.strip().startswith(line)
    assert len(plain.stderr.split("\n")) <= 3 and "Traceback" not in plain.stderr

    if isinstance(error, Exception):
        assert "Traceback" in run("--debug", "fails").stderr
