"""crossrail inside other systems. Each of these imports its host, and only when it is asked for."""
