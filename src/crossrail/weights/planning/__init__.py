"""From inventories to the plan that every update replays, and the proof that the plan is right. Knows no engine.

planner.py is the order of things, plan.py what comes of it, check.py the proof, show.py for people.
"""
