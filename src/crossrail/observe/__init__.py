"""What people look at when they want to know what an engine did: recorded operations, traces."""
