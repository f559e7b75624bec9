"""The example in the documentation runs as it stands."""

import re
from pathlib import Path

from tests.support.process import assert_clean, run_script

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moe.md"


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

    assert_clean(run_script(example))
