"""`crossrail bench peers`: the same shapes by crossrail and by other libraries, in one run (docs/comparison.md).

Nothing here is imported before it is asked for: an adapter imports its library when it is opened, in a process of its
own. command.py is the command, offers.py the list of who can be measured, turn.py one turn of one of them, pair.py its
two processes and their deadlines, child.py what runs there, work.py the loops, base.py what an adapter is.
"""
