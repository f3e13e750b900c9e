"""One MQTT connection that keeps itself up. The only folder that imports paho."""
