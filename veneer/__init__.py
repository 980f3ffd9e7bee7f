"""Client library of Veneer, and what both of its planes share. Importing this package imports nothing else."""
