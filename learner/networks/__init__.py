"""Networks as pure functions over layers: forward pass, losses, optimizer."""
