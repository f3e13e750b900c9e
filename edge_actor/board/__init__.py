"""The machine itself: clock, heat, power, systemd."""
