"""The control plane's API; the generated code is in `v1`."""
