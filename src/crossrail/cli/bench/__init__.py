"""`crossrail bench`: measures the engine next to the machine's own limits, side by side in the same run.

spec.py says what a measure is; copies.py, small.py, posting.py, api.py, deaths.py, footprint.py and simulator.py are
the measures, tcp_copies.py, tcp_small.py and tcp_tls.py those of TCP, rdma.py those of verbs and ofi, kv.py those of KV
transfers, between the sides of kv_sides.py; passes.py and paged.py are what copies share; pair.py and peer.py are the
two processes, sockets.py and bare_rdma.py the bare loops between them; command.py has the options, measures.py runs
them. hosts/ measures with a `bench serve`, on another host or on this one, moe/ MoE layers, peers/ other libraries.
What becomes of the figures, in outputs.py: report.py is the table, saved.py the JSON file, plot.py the pictures,
page.py the report for browsers, compare.py this run beside an older one; interval.py says how sure a figure is,
machine.py what it depends on.
"""
