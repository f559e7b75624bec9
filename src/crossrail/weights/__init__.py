"""Weight updates for RL: trainers write changed weights straight into the memory of inference ranks.

Inventories say who holds what, make_plan() says once and for all who sends what to whom, and every update replays it:
WeightController, WeightTrainer and WeightReceiver are the services that do (docs/weights.md).
"""

from typing import TYPE_CHECKING

from crossrail._lazy import lazily, listed

if TYPE_CHECKING:
    from crossrail.weights.errors import (
        MemberRefused,
        NotFinite,
        PlanError,
        TornWeights,
        Unheld,
        UpdateFailed,
        WatermarkTooSmall,
    )
    from crossrail.weights.inventory.holdings import Holding, Inventory, RegionInfo
    from crossrail.weights.inventory.memory import WeightMemory
    from crossrail.weights.planning.check import check_plan
    from crossrail.weights.planning.plan import Plan
    from crossrail.weights.planning.planner import PlanOptions, make_plan
    from crossrail.weights.services import messages
    from crossrail.weights.services.controller import WeightController
    from crossrail.weights.services.metrics import UpdateCollector
    from crossrail.weights.services.reading import Reading
    from crossrail.weights.services.receiver import WeightReceiver
    from crossrail.weights.services.reports import ControllerOptions, UpdateReport
    from crossrail.weights.services.trainer import WeightTrainer
    from crossrail.weights.step.step import StepReport

__all__ = [
    "ControllerOptions",
    "Holding",
    "Inventory",
    "MemberRefused",
    "NotFinite",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Reading",
    "RegionInfo",
    "StepReport",
    "TornWeights",
    "Unheld",
    "UpdateCollector",
    "UpdateFailed",
    "UpdateReport",
    "WatermarkTooSmall",
    "WeightController",
    "WeightMemory",
    "WeightReceiver",
    "WeightTrainer",
    "check_plan",
    "make_plan",
    "messages",
]

# `crossrail weights --help` should not have to import numpy. Hidden from type checkers, as in crossrail itself.
if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "ControllerOptions": "services.reports",
            "Holding": "inventory.holdings",
            "Inventory": "inventory.holdings",
            "MemberRefused": "errors",
            "NotFinite": "errors",
            "Plan": "planning.plan",
            "PlanError": "errors",
            "PlanOptions": "planning.planner",
            "Reading": "services.reading",
            "RegionInfo": "inventory.holdings",
            "StepReport": "step.step",
            "TornWeights": "errors",
            "Unheld": "errors",
            "UpdateCollector": "services.metrics",
            "UpdateFailed": "errors",
            "UpdateReport": "services.reports",
            "WatermarkTooSmall": "errors",
            "WeightController": "services.controller",
            "WeightMemory": "inventory.memory",
            "WeightReceiver": "services.receiver",
            "WeightTrainer": "services.trainer",
            "check_plan": "planning.check",
            "make_plan": "planning.planner",
        },
        modules=["errors", "inventory", "planning", "services", "services.messages", "step"],
    )


__dir__ = listed(__name__, __all__)
