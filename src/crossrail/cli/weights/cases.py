"""The cases of `crossrail weights sim`: a model on a cluster, updated in one or more ways, each with its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossrail.cli.weights.commands import SWEPT
from crossrail.cli.weights.common import sides_of
from crossrail.cli.weights.simulate import Outcome, Setting, adapted, simulate
from crossrail.errors import UsageError
from crossrail.weights import PlanOptions, make_plan


@dataclass(frozen=True)
class Case:
    """sizes: of the cluster, and layers, as cluster_options() has them. ways: of WAYS."""

    model: str
    sizes: Mapping[str, int | None]
    ways: tuple[str, ...]
    setting: Setting

    def at(self, name: str, value: float) -> Case:
        """The same case with another value of one of SWEPT."""
        if name in self.sizes:
            return replace(self, sizes={**self.sizes, name: int(value)})
        if name == "straggler":
            return replace(self, setting=replace(self.setting, straggler=value))
        return replace(self, setting=replace(self.setting, slow_link=value))

    def run(self, say: Callable[[str], None]) -> dict[str, Outcome]:
        """The outcome of each way. say: called with what is going on. Blocks."""
        trainers, targets = sides_of(self.model, **self.sizes)
        found: dict[str, Outcome] = {}
        plan = None
        for way in self.ways:
            setting = replace(self.setting, collective=way == "paper")
            say(f"{way}: planning")
            if way == "adapted":
                assert plan is not None, "it adapts to what the way before it showed"
                plan = adapted(plan, trainers, targets, found["needed"])
            else:
                plan = make_plan(trainers, targets, PlanOptions(gather="full" if setting.collective else "needed"))
            say(f"{way}: simulating {len(plan.writes):,} writes")
            found[way] = simulate(plan, trainers, targets, setting)
        return found


def sweep_of(text: str) -> tuple[str, tuple[float, ...]]:
    """ "trainers" or "trainers=1,8,64" to its name and values. UsageError."""
    name, equals, given = text.partition("=")
    if name not in SWEPT:
        raise UsageError(f"--sweep {name}: must be one of {', '.join(SWEPT)}")
    try:
        values = tuple(float(value) for value in given.split(",")) if equals else SWEPT[name]
    except ValueError:
        raise UsageError(f"--sweep {text}: {given!r} are not numbers; write for example {name}=1,2,4") from None
    for value in values:
        if name in ("trainers", "targets") and not (value >= 1 and value.is_integer()):
            raise UsageError(f"--sweep {text}: {value:g} is not a number of ranks")
    return name, values


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The figures; without the spans."""
    content = outcome._asdict()
    del content["spans"], content["busy_s"]
    return content | {"bound": outcome.bound, "over_bound": outcome.over_bound}
