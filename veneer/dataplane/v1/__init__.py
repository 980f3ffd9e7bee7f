"""Generated messages and stubs of `proto/veneer/dataplane/v1`."""
