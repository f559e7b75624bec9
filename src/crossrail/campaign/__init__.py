"""Randomised campaigns: what is done and checked in them, whatever carries it, and the one over real processes.

`books` and `checkers` keep book of operations and hold the contract against what happened; `actions` draws what is done
from a seed. Simulated engines do it in `crossrail.sim.workload`, processes that are killed, frozen and cut off in
`rounds`: `python -m crossrail.campaign`, in the development tree `./dev campaign`. `soak` does the latter for an hour.
"""
