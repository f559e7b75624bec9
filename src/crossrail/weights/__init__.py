"""Weight updates for RL: trainers write what has changed straight into the memory of inference ranks.

Inventories say who holds what, make_plan() says once and for all who sends what to whom, and every update replays it:
WeightController, WeightTrainer and WeightReceiver are the services that do (docs/weights.md).
"""

from crossrail.weights.check import PlanError, check_plan
from crossrail.weights.controller import ControllerOptions, UpdateReport, WeightController
from crossrail.weights.errors import NotFinite, Refused, TornWeights, UpdateFailed, WatermarkTooSmall
from crossrail.weights.inventory import Holding, Inventory, RegionInfo
from crossrail.weights.memory import WeightMemory
from crossrail.weights.plan import Plan
from crossrail.weights.planner import PlanOptions, make_plan
from crossrail.weights.receiver import Reading, WeightReceiver
from crossrail.weights.step import StepReport
from crossrail.weights.trainer import WeightTrainer

__all__ = [
    "ControllerOptions",
    "Holding",
    "Inventory",
    "NotFinite",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Reading",
    "Refused",
    "RegionInfo",
    "StepReport",
    "TornWeights",
    "UpdateFailed",
    "UpdateReport",
    "WatermarkTooSmall",
    "WeightController",
    "WeightMemory",
    "WeightReceiver",
    "WeightTrainer",
    "check_plan",
    "make_plan",
]
