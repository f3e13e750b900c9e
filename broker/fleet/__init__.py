"""Who belongs to a fleet: keys, certificates and the bundles of its actors, on disk."""
