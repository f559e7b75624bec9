"""An SGLang that our classes do not fit is refused when a server starts."""

import inspect
from typing import Any

import pytest

import crossrail as xr
from crossrail.integrations.interface import SGLANG
from crossrail.integrations.sglang import plugin


class Base:
    def __init__(self, mgr: Any, room: int) -> None: ...

    def poll(self) -> None: ...


def test_all_classes_fit_the_one_that_is_here() -> None:
    classes = plugin._classes()
    assert len(classes) == 4 and not any(inspect.isabstract(one) for one in classes.values())


def test_an_argument_that_is_not_known_is_named() -> None:
    class Ours(Base):
        def __init__(self, mgr: Any) -> None: ...

    with pytest.raises(xr.UsageError, match=rf"{SGLANG.version}: Base\.__init__ is given room; install sglang=="):
        SGLANG.check(Ours, Base)


def test_what_is_abstract_still_is_named() -> None:
    from sglang.srt.disaggregation.base.conn import BaseKVSender

    with pytest.raises(xr.UsageError, match=r"BaseKVSender wants .*send"):
        SGLANG.check(BaseKVSender, BaseKVSender)


def test_what_fits_fits() -> None:
    class Ours(Base):
        def poll(self, more: int = 0) -> None: ...

    SGLANG.check(Ours, Base)
