"""Data-parallel replicas of a producer, each an instance of its own, as far as names and requests tell of them."""

from __future__ import annotations

import re

from crossrail._latest import Latest
from crossrail.integrations.instance import Instance

_NAME = re.compile(r"(.*)_dp\d+", re.DOTALL)  # how vLLM names the engines of its replicas
_REMEMBERED = 1024


def is_replica(engine_id: str) -> bool:
    return _NAME.fullmatch(engine_id) is not None


class Replicas:
    """Those that requests have come from. Threads: the scheduler's."""

    def __init__(self) -> None:
        self._seen: Latest[str, Instance] = Latest(_REMEMBERED)

    def see(self, instance: Instance) -> bool:
        """The latest of a name is the one that runs. Whether it has not been seen before."""
        is_new = self._seen.get(instance.name) != instance
        self._seen[instance.name] = instance
        self._seen.move_to_end(instance.name)
        return is_new

    def others(self, instance: Instance) -> list[Instance]:
        """Of the same server."""
        name = _NAME.fullmatch(instance.name)
        if name is None:
            return []
        found = ((_NAME.fullmatch(other.name), other) for other in self._seen.values())
        return [other for its, other in found if its and its[1] == name[1] and other.name != instance.name]
