"""The examples in the documentation run as they stand, and its table has all options as they are."""

import re
from pathlib import Path

import click
import pytest

from crossrail.cli.kv.commands import decoder, prefiller, router
from crossrail.cli.kv.top import top
from tests.support.process import assert_clean, run_script

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["kv-library.md", "kv-engine.md"])
def test_the_example_of_the_page_runs(page: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)

    assert_clean(run_script(example))


def told() -> dict[tuple[str, str], str]:
    """Default by command and option, as the table has it."""
    page = (DOCS / "kv.md").read_text()
    (table,) = re.findall(r"^\| option \| of \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    found: dict[tuple[str, str], str] = {}
    for row in table.splitlines():
        options, commands, defaults, _ = (cell.strip() for cell in row.strip("|").split("|", 3))
        names = re.findall(r"`(--[a-z-]+)`", options)
        values = [value.strip() for value in defaults.split(",")] if len(names) > 1 else [defaults]
        for command in commands.split(", "):
            found |= {(command, name): value for name, value in zip(names, values, strict=True)}
    return found


def there() -> dict[tuple[str, str], str]:
    """The same, as the commands have it."""
    found: dict[tuple[str, str], str] = {}
    for command in (router, prefiller, decoder, top):
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                (name,) = option.opts
                found[str(command.name), name] = _text(option.to_info_dict()["default"])
    return found


def _text(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None or default is False or default == () else str(default)


def test_the_table_has_each_option_with_its_default() -> None:
    in_words = {  # of the table, for what a command works out by itself
        **{(command, "--rails"): "1" for command in ("router", "prefiller", "decoder")},
        ("prefiller", "--membership"): "embedded",
        ("decoder", "--membership"): "embedded",
    }

    assert told() == there() | in_words
