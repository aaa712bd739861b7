"""What stands around a whole optimizer: macro-batches, precision, loss scale, skipping."""
