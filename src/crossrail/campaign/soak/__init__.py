"""The soak: processes load each other at full speed, are killed and cut off meanwhile, and keep records of it all.

The campaign over processes (crossrail.campaign.rounds) orders each operation and waits for its end: exact, but only a
hundred operations a second. Here each process draws its own operations on several threads, thousands a second, and
keeps books in shared memory (`records`), which survive a SIGKILL: a row is written before the submit, and again after
the completion. The writer checks the bytes at every completion; the parent compares all books after every round
(`judge`, pure functions over records). `load` is what a thread does, `life` an engine and its memory, `worker` the
process, `seats` the parent's view of it, `chaos` the schedule of faults, `rounds` one round, `run` many of them. In the
development tree: ./dev soak.
"""
