"""What people order the actors of a fleet: numbered and kept, sent, answered."""
