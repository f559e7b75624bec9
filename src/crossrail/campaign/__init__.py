"""Randomised campaigns: what they do and check, whatever carries the operations, and the campaign over real processes.

`books` and `checkers` keep book of operations and hold the contract against what happened; `actions` draws what is done
from a seed. Simulated engines do it in `crossrail.sim.workload`, processes that are killed, frozen and cut off in
`rounds`: `python -m crossrail.campaign`, in the development tree `./dev campaign`. `soak` does the latter for an hour.
"""
