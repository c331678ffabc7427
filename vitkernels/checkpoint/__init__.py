"""Write, find and load checkpoints: model, optimizer and random state, and weights exported for timm."""
