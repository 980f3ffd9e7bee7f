"""Adapters in memory: the byte image, the device arena, and who is resident."""
