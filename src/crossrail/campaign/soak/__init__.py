"""The soak: processes load each other at full speed, are killed and cut off meanwhile, and keep records of it all.

The campaign over processes (crossrail.campaign.rounds) tells a process each operation and hears of its end: exact, and
a hundred operations a second. Here each process draws its own operations on several threads, thousands a second, and
keeps books in shared memory (`records`), which outlive a SIGKILL: a row is written before the submit, and again after
the completion. Who wrote looks at the bytes at every completion; the parent holds the books of all against each other
after every round (`judge`, pure functions over records). `load` is what a thread does, `life` an engine and its memory,
`worker` the process, `seats` what the parent sees of it, `chaos` the schedule of faults, `rounds` one round, `run` many
of them. In the development tree: ./dev soak.
"""
