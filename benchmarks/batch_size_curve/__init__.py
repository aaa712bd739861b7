"""Steps to a target against batch size, for every optimizer, each tuned with the same budget."""
