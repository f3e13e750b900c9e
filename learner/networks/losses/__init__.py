"""What algorithms minimise, as pure functions, named and shaped as in rlax (https://github.com/google-deepmind/rlax)."""
