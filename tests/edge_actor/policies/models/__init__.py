"""Models that the tests and benchmarks of the actor run, and the program that made them."""
