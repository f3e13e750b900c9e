"""A training run: its parts are built here, looped in `loop`, shown by `reports`; and a whole fleet on one machine."""
