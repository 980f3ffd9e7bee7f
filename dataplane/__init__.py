"""The data plane: streams tokens of many adapters from one base model."""
