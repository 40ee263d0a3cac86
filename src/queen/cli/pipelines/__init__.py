"""`queen pipeline`: run, watch and try data pipelines."""
