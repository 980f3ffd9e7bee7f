"""What one caller can do to the others: attacks on a system of their own, and what the victims notice."""
