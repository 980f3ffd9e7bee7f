"""Model code: what a configuration says, layers, and one readable forward for all families."""
