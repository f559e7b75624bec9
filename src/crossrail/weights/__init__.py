"""Weight updates for RL: trainers write what has changed straight into the memory of inference ranks.

Inventories say who holds what, make_plan() says once and for all who sends what to whom, and every update replays it:
WeightController, WeightTrainer and WeightReceiver are the services that do (docs/weights.md).
"""

from crossrail.weights.errors import NotFinite, Refused, TornWeights, UpdateFailed, WatermarkTooSmall
from crossrail.weights.inventory.holdings import Holding, Inventory, RegionInfo
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.check import PlanError, check_plan
from crossrail.weights.planning.plan import Plan
from crossrail.weights.planning.planner import PlanOptions, make_plan
from crossrail.weights.services import messages
from crossrail.weights.services.controller import WeightController
from crossrail.weights.services.receiver import Reading, WeightReceiver
from crossrail.weights.services.reports import ControllerOptions, UpdateReport
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.step.step import StepReport

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
    "messages",
]
