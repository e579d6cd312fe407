"""What a plan is for: GPUs, memory, links; described by name or looked up on this machine."""
