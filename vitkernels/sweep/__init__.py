"""Run each job of a multirun in its own process and compare the variants in one verdict table."""
