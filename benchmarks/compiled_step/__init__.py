"""What XLA makes of a step for GPUs and TPUs that are not there."""
