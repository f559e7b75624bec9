"""`crossrail demo`: a real file moved between two processes and checked."""
