"""What has arrived: it waits until the loop takes it, and what comes in floods is no longer heard."""
