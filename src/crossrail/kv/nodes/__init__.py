"""Prefillers and decoders: what they do for a request, and how they belong to their routers."""
