"""Tests of the contract and the brokers."""
