"""What the training loop is made of: a file for each thing that it decides."""
