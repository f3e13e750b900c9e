"""What steps are kept in behind the ledger: replay, drawn from many times, and rollouts, learned from once."""
