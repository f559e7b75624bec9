"""`crossrail bench peers`: the same shapes by crossrail and by other libraries, in one run (docs/comparison.md).

Nothing here is imported before it is needed: an adapter imports its library when it is opened, in a process of its own.
command.py is the command, offers.py the list of libraries, turn.py one turn of one of them, pair.py its two processes
and their deadlines, child.py what runs there, work.py the loops, base.py the interface of an adapter.
"""
