"""How services on engines talk: sealed packets, questions and answers. What the messages mean is up to kv and weights.

wire.py carries packets; seal.py makes them authentic, each taken once; language.py makes bytes of messages; messages.py
has those that every service knows; mailbox.py asks until it is answered, and runs each question once.
"""
