"""The examples in the documentation run as they stand."""

import re
from pathlib import Path

import pytest

from tests.support.process import assert_clean, run_script

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["kv-library.md", "kv-engine.md"])
def test_the_example_of_the_page_runs(page: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)

    assert_clean(run_script(example))
