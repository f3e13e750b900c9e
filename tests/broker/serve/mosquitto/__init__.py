"""Tests of broker/serve/mosquitto."""
