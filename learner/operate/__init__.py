"""What a fleet's owner does by hand while it runs: gives orders to actors, and watches all of them on a page."""
