"""New releases of the actor's program: taken over the network, unpacked beside what runs, tried, kept or given up."""
