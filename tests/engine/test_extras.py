"""What a program that imports a part of crossrail is told where that part's extra is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.limits import PROGRAM_S

# crossrail's own dependencies are there, and nothing else that is not Python's.
BARE = """
import sys
OTHERS = "aiohttp matplotlib opentelemetry pytest sglang torch transformers triton vllm".split()
class Absent:
    def find_spec(name, *_):
        if name in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent)
"""
# Modules are imported by themselves, but for those inside of the command line and of other people's engines.
EACH_MODULE = """
import importlib, pkgutil
import crossrail
inside = ("crossrail.cli.", "crossrail.integrations.sglang.", "crossrail.integrations.vllm.", "crossrail.weights.rl.")
for module in pkgutil.walk_packages(crossrail.__path__, "crossrail."):
    if not module.name.endswith("__main__") and not module.name.startswith(inside):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, "|", error)
"""


def printed(script: str) -> list[str]:
    """What it prints where no extra is installed."""
    done = subprocess.run(
        [sys.executable, "-c", BARE + script],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROGRAM_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_module_names_the_extra_that_it_needs() -> None:
    lines = printed(EACH_MODULE)
    assert len(lines) > 15
    assert [line for line in lines if "pip install " not in line] == []


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import crossrail.testing", "crossrail.testing needs pytest: pip install pytest"),
        ("from crossrail.integrations.deepep import Buffer", "needs torch: pip install 'crossrail[torch]'"),
        ("import crossrail.integrations.transformers", "needs torch: pip install 'crossrail[transformers]'"),
        (
            "from crossrail.moe import TorchGroup; TorchGroup()",
            "TorchGroup needs torch: pip install 'crossrail[torch]'",
        ),
        (
            "from crossrail.integrations.vllm import CrossrailConnector",
            "crossrail.integrations.vllm.CrossrailConnector needs vllm: pip install vllm 'crossrail[vllm]'",
        ),
        (
            "from crossrail.integrations.sglang import CrossrailKVManager",
            "crossrail.integrations.sglang.CrossrailKVManager needs sglang: pip install sglang 'crossrail[sglang]'",
        ),
    ],
)
def test_what_is_missing_is_named_with_how_to_get_it(statement: str, said: str) -> None:
    (line,) = printed(f"try:\n    {statement}\nexcept ModuleNotFoundError as error:\n    print(error)")
    assert line.endswith(said)
