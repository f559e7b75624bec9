"""on_lost="mask": rounds continue without lost ranks. Without shared memory the ranks left first agree on it."""
