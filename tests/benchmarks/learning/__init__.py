"""What learning gains or keeps: whole runs, side by side."""
