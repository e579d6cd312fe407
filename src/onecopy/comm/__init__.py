"""Every byte that leaves the process: mesh axes, collectives, and the ledger that records them."""
