"""Chat templates of base models: reading them from a model folder, and rendering them in a process that can be ended."""
