"""Steps as XLA compiles them for GPUs and TPUs, on any machine."""
