"""A trainer's work in an update: its rows of the plan, prepared once, are gathered, converted and written in each step.

ready.py and task.py are what is replayed, schedule.py and arena.py who may begin, step.py does it. Knows no messages.
"""
