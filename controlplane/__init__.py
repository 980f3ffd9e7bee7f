"""The control plane: tenants, keys, bases, adapters, versions and aliases in Postgres; hints in Redis."""
