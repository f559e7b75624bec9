"""Router, prefillers and decoders: who serves which request, and what happens when one of them fails."""
