"""From a description to an answer: estimates, the option to take, sweeps, and the pages that show them."""
