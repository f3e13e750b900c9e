"""Tests of broker/contract/acting."""
