"""The tuner: the best settings for a model on a machine, found by measuring."""
