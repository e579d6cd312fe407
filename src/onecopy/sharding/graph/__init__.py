"""What autograd, Python's frames and nested arguments tell of a computation under way. Knows nothing of sharding.

Take from here: `boundary` (is a backward running, where does a unit's graph begin), `tensors` (find and replace tensors
in arguments), `frames` (does a forward still run).
"""
