"""Finds what would make transfers slow, impossible or unsafe on this machine, before users do.

    finding.py     what a check says            host.py, hardware.py, probes.py   the machine as checks see it
    topics.py      all checks, by topic         report.py, show.py                run, JSON, text
    reach/         reachability and speed between two machines

A check is a function of a `Host` that yields `Finding`s. It asks nothing but the host, so made-up folders test it, and
it never raises for what it finds there. Nothing here needs crossrail's native module in this process: the doctor works
where crossrail does not (see __main__.py).
"""
