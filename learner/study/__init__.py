"""Commands that look at fleets and finished runs: fidelity, export, benchmarks of boards."""
