"""`python -m crossrail` is the command line."""

from crossrail.cli import main

main(prog_name="crossrail")
