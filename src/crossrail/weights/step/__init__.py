"""What a trainer does in an update: its rows of the plan, made ready once, are gathered, prepared and written.

ready.py and task.py are what is replayed, schedule.py and arena.py who may begin, step.py does it. Knows no messages.
"""
