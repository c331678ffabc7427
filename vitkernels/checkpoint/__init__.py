"""Write, find and read checkpoints: model, optimizer and random state."""
