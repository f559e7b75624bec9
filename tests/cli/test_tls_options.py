"""`--tls-cert` and its like of `serve`, `push` and `explain` that cannot be: one line and status 2.

What happens between two that have them is in tests/multihost/test_commands.py: on one host bytes go by shared memory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import crossrail as xr
from crossrail.cli.main import main
from crossrail.cli.rendezvous import publish
from tests.support.certificates import Authority

FILES = ("cert", "key", "ca")
NAME = f"tls-options-{os.getpid()}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls(authority: Authority) -> xr.TlsConfig:
    return authority.issue()


@pytest.fixture(params=["serve", "push", "explain"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """As far as its engine, which is the last thing to go wrong."""
    inbox, payload = tmp_path / "inbox", tmp_path / "payload"
    inbox.mkdir()
    payload.write_bytes(b"bytes")
    arguments = {
        "serve": ["serve", "--dir", str(inbox), "--listen", "0"],
        "push": ["push", str(payload), f"{NAME}:"],
        "explain": ["explain", NAME],
    }[request.param]
    return [*arguments, "--rails", "127.0.0.1"]


def run(arguments: list[str], environment: dict[str, str] | None = None) -> Result:
    variables: dict[str, str | None] = {name: None for name in os.environ if name.startswith("CROSSRAIL_TLS_")}
    with xr.Engine("target", transport="shm") as target, publish(NAME, target.address):
        return CliRunner().invoke(main, arguments, env={**variables, **(environment or {})})


def expect_line(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def options(**files: object) -> list[str]:
    return [text for name, path in files.items() for text in (f"--tls-{name}", str(path))]


@pytest.mark.parametrize("missing", FILES)
def test_one_of_the_three_is_not_given(command: list[str], tls: xr.TlsConfig, missing: str) -> None:
    given = {name: getattr(tls, name) for name in FILES if name != missing}

    result = run(command + options(**given))

    expect_line(result, f"--tls-{missing} is not", "a certificate, its key and a CA")


@pytest.mark.parametrize("gone", FILES)
def test_file_is_not_there(command: list[str], tls: xr.TlsConfig, tmp_path: Path, gone: str) -> None:
    files = {name: getattr(tls, name) for name in FILES} | {gone: tmp_path / "gone.pem"}

    result = run(command + options(**files))

    expect_line(result, f"tls.{gone} = '{tmp_path / 'gone.pem'}' cannot be read: No such file")


def test_key_is_of_another_certificate(command: list[str], tls: xr.TlsConfig, authority: Authority) -> None:
    result = run(command + options(cert=tls.cert, key=authority.issue("other").key, ca=tls.ca))

    expect_line(result, "is not the key of tls.cert")


def test_environment_names_a_part(command: list[str], tls: xr.TlsConfig) -> None:
    result = run(command, {"CROSSRAIL_TLS_CERT": str(tls.cert)})

    expect_line(result, "CROSSRAIL_TLS_CERT is set and CROSSRAIL_TLS_KEY is not")


@pytest.mark.no_sanitizer
def test_bench_measures_it_beside_the_clear(tls: xr.TlsConfig, tmp_path: Path) -> None:
    environment = {f"CROSSRAIL_TLS_{name.upper()}": str(getattr(tls, name)) for name in FILES}
    bench = ["bench", "--transport", "tcp", "--only", "tls-paged-64k", "--quick", "--runs", "1", "--pool-bytes", "64M"]

    done = run([*bench, "--json", str(tmp_path / "out.json")], environment)

    assert done.exit_code == 0, done.output
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["limit_is"] == "the same in the clear" and result["value"] and result["limit"]
    gone = run(bench, environment | {"CROSSRAIL_TLS_KEY": str(tmp_path / "gone.pem")})
    assert gone.exit_code != 0 and "gone.pem" in "".join(
        gone.output.split()
    )  # the files are read; a table may cut their names
    expect_line(run(bench), "--only tls-paged-64k fits no measure")


def test_key_that_others_may_read_is_told_to_the_user(command: list[str], tls: xr.TlsConfig, tmp_path: Path) -> None:
    os.chmod(tls.key, 0o644)

    # Ends by another error, which is told after it.
    result = run(command + options(cert=tls.cert, key=tls.key, ca=tmp_path / "gone.pem"))

    lines = result.stderr.splitlines()
    assert len(lines) == 2 and lines[0].startswith("warning: tls.key") and lines[1].startswith("error: "), lines
    assert lines[0].endswith(f"chmod 600 {tls.key}")
