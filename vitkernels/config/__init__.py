"""The typed configuration of a run."""
