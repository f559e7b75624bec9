"""on_lost="mask": rounds go on without lost ranks. Where not all ranks share memory, those left agree on it first."""
