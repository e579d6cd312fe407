"""The engine's schedule for the planner: simulated on fake tensors and ranks, and written down as arithmetic."""
