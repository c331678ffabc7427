"""Run the jobs of a multirun in processes of their own and compare them in one verdict table."""
