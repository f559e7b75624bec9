"""What `./dev format` does to comments of C++ that are too wide (tools/dev/comments.py)."""

import pytest
from tools.dev.comments import WIDTH, too_wide, wrapped

REST = "one-that-does-not-fit."
LONG = "word " * 22 + REST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"// {LONG}", [REST]),
        (f"  // {LONG}\n  // And more.\nint x;", [f"{REST} And more.", "int x;"]),
        (f"// {LONG}\n  // Of something deeper.", [REST, "Of something deeper."]),
        (f"// {LONG}\n//\n// A new paragraph.", [REST, "", "A new paragraph."]),
        (f"// {LONG}\n// of_another: a label.", [REST, "of_another: a label."]),
        (f"// {LONG}\n// Invariant: it holds.", [REST, "Invariant: it holds."]),
        (f"// 1. {LONG}\n// 2. Another.", [f"   {REST}", "2. Another."]),
        (f"// - {LONG}\n//   Goes on.", [f"  {REST} Goes on."]),
    ],
)
def test_wide_comment_is_wrapped_into_what_continues_it(text: str, expected: list[str]) -> None:
    assert too_wide(text) == [1]

    lines = wrapped(text).split("\n")

    assert len(lines[0]) <= WIDTH and too_wide("\n".join(lines)) == []
    assert [line.strip().removeprefix("//").removeprefix(" ") for line in lines[1:]] == expected
    assert " ".join(wrapped(text).replace("//", "").split()) == " ".join(text.replace("//", "").split())


@pytest.mark.parametrize("text", [f"// word   {LONG}", f"int x;  // {LONG}"])
def test_table_and_comment_behind_code_are_left_to_people(text: str) -> None:
    assert too_wide(text) == [1]
    assert wrapped(text) == text


def test_text_that_is_no_comment_is_not_looked_at() -> None:
    assert too_wide(f'R"({LONG * 2})"\nauto url = "https://{LONG}";') == []
