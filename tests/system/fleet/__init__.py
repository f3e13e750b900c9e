"""A fleet in the hand: orders, audits, trials, updates, standbys, and programs for it."""
