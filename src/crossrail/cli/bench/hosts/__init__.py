"""`crossrail bench serve` and `crossrail bench run HOST:PORT`: two machines, or two shells, measure between them.

The two commands find each other by crossrail.cli.meeting, under a shared secret, and talk by messages between two
engines of their own (wire.py, post.py). What is measured are other engines: each side starts as many worker processes
as the run wants (workers.py starts and drives them, worker.py is what they do), and worker i here writes to and reads
from worker i there. sweep.py says what is measured, and what the machine can do beside it; driver.py directs passes.
"""
