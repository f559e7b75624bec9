"""Plans for members that come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crossrail.errors import CrossrailError
from crossrail.weights.errors import Unheld
from crossrail.weights.inventory.holdings import Inventory
from crossrail.weights.planning.plan import Plan
from crossrail.weights.planning.planner import PlanOptions, make_plan

_NAMED = 8  # of those who are gone


class Replanner:
    """Makes one plan after another, and remembers what was in the earlier ones. Threads: one at a time.

    Invariant: meshes, trainers and parameters that were in an earlier plan may be missing now, which is no mistake of
    those who stay.
    """

    def __init__(self, options: PlanOptions) -> None:
        self._options = options
        self._meshes: set[str] = set()
        self._trainers: set[int] = set()  # by rank
        self._wanted: dict[int, Sequence[str]] = {}  # parameters, by inference rank

    def plan(
        self,
        trainers: Sequence[Inventory],
        targets: Sequence[Inventory],
        speeds: Mapping[int, float],
        went: Mapping[int, str],
    ) -> Plan:
        """A plan for these. speeds: of trainers, by rank. went: by rank, trainers that have gone since the last plan,
        and why; named where nobody holds any more what is wanted.

        Blocks, some seconds for the largest models. UsageError if holdings do not fit together; CrossrailError if
        nobody holds what is wanted any more, maybe since somebody went.
        """
        meshes = {mesh for trainer in trainers for mesh in trainer.meshes}
        self._meshes |= meshes
        gone = self._meshes - meshes  # no error: others may hold the same, and the update goes on
        ranks = {trainer.rank for trainer in trainers}
        partial = self._options.partial or not self._trainers <= ranks
        wanted = {target.rank: target.names for target in targets}
        if self._wanted and not targets:
            raise CrossrailError("all inference ranks have gone, and none has joined since")
        lost = {name for rank, names in self._wanted.items() if rank not in wanted for name in names}
        ignore = (*self._options.ignore, *lost)  # a stage of a pipeline, say: no mistake of the others
        groups = tuple(tuple(mesh for mesh in group if mesh not in gone) for group in self._options.groups)
        try:
            options = replace(self._options, speeds=speeds, groups=groups, partial=partial, ignore=ignore)
            plan = make_plan(trainers, targets, options)
        except Unheld as error:
            if not went:
                raise
            named = ", ".join(f"trainer {rank} ({went[rank]})" for rank in sorted(went)[:_NAMED])
            more = f", and {len(went) - _NAMED} more" if len(went) > _NAMED else ""
            why = str(error).partition(". Next: ")[0]  # those who are gone had it
            raise CrossrailError(f"{why}. Gone since the last plan: {named}{more}") from None
        self._trainers |= ranks
        self._wanted.update(wanted)
        return plan
