"""What a fleet of many carries."""
