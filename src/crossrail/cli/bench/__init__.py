"""`crossrail bench`: what the engine does beside what the machine can do, side by side in the same run.

spec.py says what a measure is; copies.py, small.py, posting.py, api.py and footprint.py are the measures; pair.py and
peer.py are the two processes; report.py is the table and the JSON file; command.py puts them together.
"""
