"""Real models for crossrail.kv: transformers models on the CPU, with their KV in crossrail's pages.

paged.py is the cache that transformers writes to; hosted.py, a Model around a transformers model; steps.py, batching of
decode steps; examples.py, small configurations with random weights; checkpoint.py, models from a directory; named.py,
both by name; tokenizer.py, for the router. All but steps.py need `crossrail[transformers]`.
"""
