"""The papers' formulas and the constants fitted beside them. Pure functions of numbers: no torch, no file, no model."""
