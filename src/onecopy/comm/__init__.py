"""Every byte that leaves the process: mesh axes, collectives, and the ledger and timeline that record them."""
