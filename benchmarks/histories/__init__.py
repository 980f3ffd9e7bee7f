"""Histories of the catalogue under faults, and a checker of them; see docs/adr/0048-histories-of-the-catalogue.md."""
