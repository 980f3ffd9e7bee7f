"""Model code: a configuration, layers, and one readable forward per family."""
