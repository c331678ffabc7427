"""The training loop and its parts: step plan, trainer, evaluation, timing, logging and run folders."""
