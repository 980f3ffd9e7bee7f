"""Low-rank products over a mixed batch: the rank-row list, its slow reference, and the forms that serve."""
