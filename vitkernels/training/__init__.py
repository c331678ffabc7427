"""The parts of the training loop that are not the model's: clock, checkpoints, logs, signals, sweeps."""
