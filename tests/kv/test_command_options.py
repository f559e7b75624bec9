"""Options of `crossrail kv` that go to the engine and to the node."""

import re
from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner

import crossrail as xr
from crossrail.cli.kv import common, nodes
from crossrail.cli.kv.commands import decoder, prefiller, router
from crossrail.cli.main import main
from crossrail.kv.nodes.node import NodeOptions
from crossrail.kv.transfer.layout import KvLayout
from tests.support.process import run_script


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (router, ["--listen", "127.0.0.1:0"]),
        (prefiller, ["--router", "http://127.0.0.1:1"]),
        (decoder, ["--router", "http://127.0.0.1:1"]),
    ],
)
@pytest.mark.parametrize(("given", "timeout_s"), [([], 10.0), (["--peer-timeout-s", "2.5"], 2.5)])
def test_engine_gives_peers_up_after_what_the_command_line_says(
    command: click.Command, words: list[str], given: list[str], timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def engine(name: str, **options: Any) -> xr.Engine:
        asked.update(options)
        raise xr.UsageError("seen")

    monkeypatch.setattr(common.xr, "Engine", engine)
    monkeypatch.setenv("CROSSRAIL_SECRET", "of this test, long enough")
    CliRunner().invoke(command, [*words, *given])
    assert asked["peer_timeout_s"] == timeout_s


def test_node_looks_for_its_router_again_after_what_the_command_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[NodeOptions] = []

    async def serve(kind: object, options: dict[str, Any]) -> None:
        seen.append(common.chosen(NodeOptions(), options))

    monkeypatch.setattr(nodes, "_serve", serve)
    for words in ([], ["--retry-s", "3"]):
        CliRunner().invoke(decoder, words, catch_exceptions=False)
    assert [options.retry_s for options in seen] == [0.5, 3.0]


@pytest.mark.parametrize(
    ("level", "told"),
    [
        (None, ["a warning", "of another release"]),
        ("warning", ["WARNING crossrail.kv: a warning", "WARNING crossrail.control: of another release"]),
        (
            "info",
            [
                "INFO crossrail: of the engine",
                "INFO crossrail.kv: an end",
                "WARNING crossrail.kv: a warning",
                "WARNING crossrail.control: of another release",
            ],
        ),
    ],
)
def test_service_logs_what_it_is_told_to(level: str | None, told: list[str]) -> None:
    script = run_script(
        """
        import logging, sys
        from crossrail.cli.kv.common import logging_as
        from crossrail.cli.main import quiet_log

        with quiet_log():
            for _ in range(2):  # it leaves nothing behind
                with logging_as(sys.argv[1] if len(sys.argv) > 1 else None):
                    pass
            with logging_as(sys.argv[1] if len(sys.argv) > 1 else None):
                logging.getLogger("crossrail").info("of the engine")
                logging.getLogger("crossrail.kv").info("an end")
                logging.getLogger("crossrail.kv.http").debug("no more")
                logging.getLogger("crossrail.kv").warning("a warning")
                logging.getLogger("crossrail.control").warning("of another release")
        """,
        *([] if level is None else [level]),
    )
    lines = script.stderr.splitlines()
    assert [line.partition(" ")[2].partition(" ")[2] if level else line for line in lines] == told
    assert script.returncode == 0 and (level is None or re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[0]))


@pytest.mark.parametrize("role", ["router", "prefiller", "decoder"])
@pytest.mark.parametrize("name", ["a\nb", "x" * 129], ids=["two lines", "long"])
def test_name_that_no_service_may_have_is_refused_before_anything_is_loaded(role: str, name: str) -> None:
    more = ["--tokenizer", "toy"] if role == "router" else ["--router", "http://127.0.0.1:1", "--model", "no:such"]
    done = CliRunner().invoke(main, ["kv", role, "--name", name, *more], env={"CROSSRAIL_SECRET": "secret"})
    assert done.exit_code == 2 and done.stderr.startswith("error: --name "), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_toy_takes_every_field_of_a_layout() -> None:
    """As the page has it."""
    layout = KvLayout(2, 30, 6, 4, 8, "bfloat16", "MHA", "NHD", separate_kv=False, tp=2)
    given = {field.name: str(getattr(layout, field.name)) for field in fields(layout)}
    assert common.open_model("toy", given).layout == layout


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("separate_kv", "maybe", "option of the toy model: separate_kv='maybe' must be true or false"),
        ("layers", "many", "option of the toy model: layers='many' must be a whole number"),
        ("seed", "1.5", "option of the toy model: seed='1.5' must be a whole number"),
        ("seed", "-1", r"seed=-1 must be in 0\.\.2\*\*128-1"),
        ("seed", str(1 << 128), r"must be in 0\.\.2\*\*128-1"),
        ("token_us", "-1", "token_us=-1 must be microseconds, 0 to 1e6"),
        ("token_us", "nan", "token_us=nan must be microseconds, 0 to 1e6"),  # no timer of the loop would be in order
        ("token_us", "inf", "token_us=inf must be microseconds, 0 to 1e6"),
    ],
)
def test_toy_says_what_is_wrong_with_an_option(option: str, value: str, words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        common.open_model("toy", {option: value})
