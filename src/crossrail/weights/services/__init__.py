"""Controller, trainers and receivers: who takes part, which version is where, and how an update ends."""
