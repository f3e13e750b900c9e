"""A whole emulated machine, from a card of flash.sh: its boot, its way into the fleet, and updates of its program."""
