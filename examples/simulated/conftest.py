pytest_plugins = ["crossrail.testing"]
