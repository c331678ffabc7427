"""The data sets by the names that configurations give them; the code is in vitkernels.data."""
