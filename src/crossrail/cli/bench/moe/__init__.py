"""`crossrail bench moe`: dispatch and combine next to memcpy of the same bytes, gloo and MPI, all in the same run.

work.py says what is dispatched; rank.py is one rank's process, ranks.py all of them as the command sees them; gate.py
is how they begin together; ordinary.py is the same by torch.distributed, mpi.py by MPI; command.py puts them together.
"""
