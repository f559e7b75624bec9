"""`crossrail bench`: measures the engine next to the machine's own limits, side by side in the same run.

spec.py says what a measure is; copies.py, small.py, posting.py, api.py, footprint.py and simulator.py are the
measures, tcp_copies.py and tcp_small.py those of TCP, kv.py those of KV transfers, between the sides of kv_sides.py;
passes.py is what copies share; pair.py and peer.py are the two processes, sockets.py the bare connection between
them; command.py puts them together. hosts/ measures with a `bench serve`, on another host or on this one. What
becomes of the figures, in outputs.py: report.py is the table, saved.py the JSON file, plot.py the pictures, page.py
the report for browsers, compare.py this run beside an older one; interval.py says how sure a figure is, machine.py
what it depends on.
"""
