"""Whole situations of LLM systems, each replayable from one number: `crossrail sim --list`."""

import importlib
import inspect
import sys
from pathlib import Path

from crossrail.errors import UsageError
from crossrail.sim.scenarios import links, moving, restarts, storm
from crossrail.sim.scenarios.base import Checks, Figure, Outcome, Run, Scenario, play

__all__ = ["SCENARIOS", "Checks", "Figure", "Outcome", "Run", "Scenario", "find", "play"]

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("pair", "writes and reads of all lengths between two engines", moving.pair),
        Scenario("paged-push", "prefill pushes KV-cache pages to decoders, layer by layer", moving.paged_push),
        Scenario("weight-fanout", "a terabyte of weights from 8 trainers to 8 ranks (phantom)", moving.weight_fanout),
        Scenario("moe-scatter", "all-to-all of tokens over 8 ranks on 4 hosts, and back", moving.moe_scatter),
        Scenario("rail-failover", "rails go down and up under load", links.rail_failover),
        Scenario("slow-rail", "one rail of four at a tenth of its speed", links.slow_rail),
        Scenario("freeze-thaw", "a worker freezes, heartbeats tell slow from dead", links.freeze_thaw),
        Scenario("partition", "two halves of the network lose each other for a while", links.partition),
        Scenario("peer-restart", "a service dies and comes back while clients write", restarts.peer_restart),
        Scenario(
            "late-packets", "writes of a killed engine meet closed memory and its successor", restarts.late_packets
        ),
        Scenario("storm", "every kind of fault at once over writes in all directions", storm.storm),
    )
}


def find(name: str) -> list[Scenario]:
    """The scenario of that name; "all": all of them; "module:function": your own, `async def function(run)`.

    Modules are looked for in the current directory too. UsageError for others.
    """
    if name == "all":
        return list(SCENARIOS.values())
    if ":" in name:
        return [_own(name)]
    if name not in SCENARIOS:
        raise UsageError(f"--scenario {name} is not known; there are {', '.join(SCENARIOS)}, all, and MODULE:FUNCTION")
    return [SCENARIOS[name]]


def _own(name: str) -> Scenario:
    module_name, _, function_name = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--scenario {name}: {error}") from None
    except Exception as error:  # whatever the user's own module does wrong
        kind = type(error).__name__
        raise UsageError(f"--scenario {name}: {module_name} cannot be imported: {kind}: {error}") from error
    if not inspect.iscoroutinefunction(function):
        raise UsageError(f"--scenario {name} is not a coroutine function (async def ...(run))")
    return Scenario(name, (inspect.getdoc(function) or "").partition("\n")[0], function)
