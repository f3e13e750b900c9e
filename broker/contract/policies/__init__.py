"""The bytes of policies: room for them, and how one is made from the one before."""
