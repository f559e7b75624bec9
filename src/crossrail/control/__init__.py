"""How services on engines talk: sealed packets, questions and answers. What the messages mean is up to kv and weights.

wire.py carries packets; seal.py authenticates them and accepts each once; language.py encodes messages; messages.py has
those common to all services; mailbox.py repeats a question until it is answered, and runs each question once.
"""
