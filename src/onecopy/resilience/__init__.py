"""Recovery: a lost rank comes back from its peers' memory. See docs/recovery.md."""
