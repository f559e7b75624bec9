"""Elements of one type into another, bit for bit the same by numpy and by torch. Knows nothing of parameters."""
