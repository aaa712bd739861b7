"""What a transform promises, and where it is checked that it keeps it."""
