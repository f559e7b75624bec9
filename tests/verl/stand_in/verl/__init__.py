"""The names of verl that crossrail's checkpoint engine uses, for where verl is not installed."""
