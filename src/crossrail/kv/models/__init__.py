"""Real models for crossrail.kv: those of transformers, on the CPU, with their KV in crossrail's pages.

paged.py is the cache that transformers writes to; hosted.py, a Model around one of its models; steps.py, decode steps
of several requests as one; examples.py, small configurations with random weights; checkpoint.py, what lies in a
directory; named.py, both by name; tokenizer.py, for the router. All but steps.py need `crossrail[transformers]`.
"""
