"""What strangers, hostile members and malformed bytes can do."""
