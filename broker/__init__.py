"""The contract that learner and actors share, and the brokers that carry it."""

__version__ = "0.1.0"
