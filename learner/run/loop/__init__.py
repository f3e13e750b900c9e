"""Parts of the training loop: a file for each thing that it decides."""
