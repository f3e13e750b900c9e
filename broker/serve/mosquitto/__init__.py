"""Mosquitto as this fleet's broker: its rendered configuration and its process."""
