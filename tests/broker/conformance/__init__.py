"""What the contract needs of a MQTT broker, asked of any by its address: `make test-brokers`."""
