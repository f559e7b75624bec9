"""`crossrail serve` and `crossrail push`: files sent to another shell, of this host or of another."""
