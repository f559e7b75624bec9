"""Where our lines go in the process of an inference engine."""

import contextlib
import io
import logging
from collections.abc import Iterator

from crossrail.integrations.log_lines import log_as


@contextlib.contextmanager
def an_engine() -> Iterator[io.StringIO]:
    """What an engine of the name `engine` logs to. Our logger has no handlers then, but pytest's."""
    ours, theirs = logging.getLogger("crossrail"), logging.getLogger("engine")
    before = ours.handlers, ours.level
    ours.handlers, ours.propagate = [], False
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    try:
        yield text
    finally:
        theirs.removeHandler(handler)
        ours.handlers, ours.propagate = before[0], True
        ours.setLevel(before[1])


def test_lines_go_where_the_engines_go_and_say_whose_they_are() -> None:
    with an_engine() as text:
        log_as("engine")
        log_as("engine")
        logging.getLogger("crossrail.kv").info("%d pages", 7)
        logging.getLogger("crossrail.kv").debug("no more than it wants")
    assert text.getvalue() == "INFO crossrail: 7 pages\n"


def test_what_somebody_has_set_stays() -> None:
    own = io.StringIO()
    with an_engine() as text:
        logging.getLogger("crossrail").addHandler(logging.StreamHandler(own))
        log_as("engine")
        logging.getLogger("crossrail.kv").warning("here")
    assert (own.getvalue(), text.getvalue()) == ("here\n", "")


def test_an_engine_that_logs_nowhere() -> None:
    with an_engine():
        log_as("another")
        assert not logging.getLogger("crossrail").handlers
