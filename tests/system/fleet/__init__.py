"""A fleet in the hand: orders, audits, trials, updates, and programs for it."""
