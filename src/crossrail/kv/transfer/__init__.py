"""The transfer of a request's KV: layouts and plans, pages and who may use them, the two sides.

layout.py says how an instance keeps its KV; plan.py, which bytes go from which rank to which, and how many counts that
makes; pages.py, who may use a page and when; sender.py and receiver.py are the two sides. No service, no message.
"""
