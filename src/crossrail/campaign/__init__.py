"""Randomised campaigns: what they do and check, whatever carries the operations, and the campaign over real processes.

`books` and `checkers` record operations and compare what happened with the contract; `actions` draws the operations
from a seed. `crossrail.sim.workload` runs them on simulated engines, `rounds` on processes that are killed, frozen and
cut off (`python -m crossrail.campaign`, in the development tree `./dev campaign`). `soak` does the latter under load.
"""
