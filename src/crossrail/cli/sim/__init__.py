"""`crossrail sim`: whole systems on simulated NICs, with faults."""
