"""Input pipelines: each data set is a module whose build(...) returns a vitkernels.data.loader.Data."""
