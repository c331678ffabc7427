"""Input pipelines: each data set is one module with `build(...) -> data.loader.Data`, from plain typed arguments."""
