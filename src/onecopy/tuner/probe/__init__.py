"""Probes: a few steps of one setting in processes of their own, and what became of them."""
