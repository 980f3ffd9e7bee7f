"""The demonstration: a real small model, adapters trained for it, and a run of the whole service that checks itself."""
