"""Generated messages and stubs of `proto/veneer/controlplane/v1`."""
