"""Experience on the learner: validated, committed to the ledger, receipted, replayed."""
