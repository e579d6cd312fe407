"""The planner: what memory and traffic will be, by the papers' formulas. Pure functions, no torch."""
