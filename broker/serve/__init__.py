"""Brokers that this project starts: Mosquitto as a child, or amqtt in the process."""
