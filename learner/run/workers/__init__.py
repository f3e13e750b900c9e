"""Processes on Ray that take in a share of the fleet's experience each: its ledger, its replay, its receipts."""
