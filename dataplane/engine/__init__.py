"""The batch engine: what runs next, on which pages, and what came out."""
