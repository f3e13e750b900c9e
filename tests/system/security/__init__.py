"""Strangers, hostile members and malformed bytes can do no harm."""
