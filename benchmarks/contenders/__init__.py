"""Programs that decode a workload, ours and others, each in a process of its own."""
