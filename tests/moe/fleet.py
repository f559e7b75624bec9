"""Ranks in processes of their own, which tests tell what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossrail.cli.child import Child, Children
from tests.moe.workloads import Workload

DEADLINE_S = 90.0


class Fleet:
    """Each process is one rank of every workload. A context manager; leaving it ends them."""

    def __init__(self, ranks: int, transport: str = "shm") -> None:
        self._children = Children([Child("tests.moe.fleet_rank", f"rank {rank}") for rank in range(ranks)])
        names = [{"name": f"rank-{rank}", "transport": transport} for rank in range(ranks)]
        addresses = self._children.each("open", names, DEADLINE_S)
        self._children.all("join", DEADLINE_S, addresses=addresses)

    def __len__(self) -> int:
        return len(self._children)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._children.close()

    def round(self, work: Workload, style: str = "whole", **options: Any) -> Sequence[str]:
        """All ranks run one round, and compare what they get. The digest of each."""
        assert work.ranks == len(self)
        return self._children.all("round", DEADLINE_S, work=work.to_json(), options=options, style=style)
