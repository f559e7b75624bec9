"""The router: which node serves which request, and what happens when one of them fails."""
