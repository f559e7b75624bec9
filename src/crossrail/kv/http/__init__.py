"""Everything over HTTP: the router's front for clients and operators, and how nodes find a router by its URL."""
