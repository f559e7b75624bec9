"""The two ways to other ranks: memory that both map (near), and writes by the rails (far)."""
