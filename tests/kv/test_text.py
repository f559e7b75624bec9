"""Text while tokens come: its pieces are the text of all, whatever a token is."""

from collections.abc import Sequence

import numpy as np
import pytest

from crossrail.kv.http.text import TextStream
from crossrail.kv.model import Tokens
from tests.support.seeds import Seed


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8: most characters are several."""

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Words:
    """One whose text depends on what is before it, as in SentencePiece: no space before the first word."""

    def encode(self, text: str) -> Tokens:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)


class Specials(Bytes):
    """One that has tokens without text, from 256 on, and says how many it has decoded."""

    decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        return super().decode([token for token in tokens if token < 256])


def pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    found = []
    for token in tokens:
        found.append(stream.add([token]))
        if stream.stopped:
            return found
    return [*found, stream.end()]


def test_characters_come_whole() -> None:
    assert pieces(TextStream(Bytes()), Bytes().encode("aä€🙂")) == [*"a", "", "ä", "", "", "€", "", "", "", "🙂", ""]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert pieces(TextStream(Bytes()), Bytes().encode("ä")[:1]) == ["", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("run", [[256], [0xFF], [0xC3], [0x80], [0xF0, 0x9F], [256, 0xE2, 256]], ids=repr)
def test_run_without_a_whole_character_costs_no_more_than_text(run: list[int]) -> None:
    tokenizer = Specials()
    text = Bytes().encode("aä🙂").tolist()
    tokens = [*text, *run * 1000, *text, *run, *text]
    assert "".join(pieces(TextStream(tokenizer), tokens)) == tokenizer.decode(tokens)
    assert tokenizer.decoded < 50 * len(tokens)


def test_pieces_make_the_whole_whatever_the_bytes_are(seed: Seed) -> None:
    draw = seed.rng()
    parts = [Bytes().encode(c).tolist() for c in "a🙂€ä"] + [[256], [0xF0], [0x9F], [0x80], [0xE2, 0x82], [0xFF]]
    for _ in range(300):
        tokens = [token for index in draw.integers(0, len(parts), 40) for token in parts[index]]
        assert "".join(pieces(TextStream(Specials()), tokens)) == Specials().decode(tokens), tokens


@pytest.mark.parametrize("tokenizer", [Bytes(), Words()], ids=["bytes", "words"])
def test_pieces_make_the_whole(tokenizer: Bytes | Words, seed: Seed) -> None:
    draw = seed.rng()
    tokens = draw.integers(0, 128, 200).tolist()
    stream, text, at = TextStream(tokenizer), "", 0
    while at < len(tokens):
        count = int(draw.integers(1, 5))
        text += stream.add(tokens[at : at + count])
        at += count
    assert text + stream.end() == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        (["end"], "the end is near", "the ", True),
        (["e"], "the end", "th", True),
        (["ends"], "the end is near", "the end is near", False),
        (["near!"], "the end is near", "the end is near", False),
        (["is near", "end is"], "the end is near", "the ", True),
        (["aab"], "aaaab", "aa", True),
        (["€"], "5 €", "5 ", True),
    ],
)
def test_stops(stops: list[str], text: str, shown: str, stopped: bool) -> None:
    stream = TextStream(Bytes(), stops)
    assert "".join(pieces(stream, Bytes().encode(text))) == shown
    assert stream.stopped is stopped


def test_beginning_of_a_stop_is_held_back_until_it_is_known() -> None:
    stream = TextStream(Bytes(), ["end"])
    assert pieces(stream, Bytes().encode("e enough")) == ["", "e ", "", "", "eno", "u", "g", "h", ""]


def test_no_tokenizer_no_text() -> None:
    assert pieces(TextStream(None), [1, 2]) == ["", "", ""]
