"""Weight updates for RL: trainers write what has changed straight into the memory of inference ranks.

Inventories say who holds what, make_plan() says once and for all who sends what to whom, and every update replays it.
"""

from crossrail.weights.check import PlanError, check_plan
from crossrail.weights.inventory import Holding, Inventory, RegionInfo
from crossrail.weights.plan import Plan
from crossrail.weights.planner import PlanOptions, make_plan

__all__ = ["Holding", "Inventory", "Plan", "PlanError", "PlanOptions", "RegionInfo", "check_plan", "make_plan"]
