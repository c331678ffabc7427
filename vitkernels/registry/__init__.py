"""Choose the backend that runs an operation: by name, or the fastest one that takes the call."""
