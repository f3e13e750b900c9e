"""The ends of an MQTT connection: clients, brokers, and strangers in their place."""
