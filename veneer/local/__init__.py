"""The whole system on one machine from the Python environment alone: Postgres, Valkey and both planes as plain processes."""
