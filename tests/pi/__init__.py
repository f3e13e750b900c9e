"""The actor on ARM: Debian roots under qemu, set up by setup_pi.sh as a user would."""
