"""Every number that the README quotes, each with the command that measures it."""
