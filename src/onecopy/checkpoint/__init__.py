"""Checkpoints: saved at any stage and number of ranks, loaded at any other, and in the ecosystem's formats."""
