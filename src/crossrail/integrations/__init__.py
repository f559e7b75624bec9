"""crossrail inside other systems. Each integration imports its host system, and only when it is used."""
