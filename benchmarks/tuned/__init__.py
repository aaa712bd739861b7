"""The test loss after a fixed number of steps, for every optimizer, each tuned alike."""
