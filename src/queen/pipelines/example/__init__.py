"""A worked example: events of leads, enriched, scored in windows, to a queue and to Parquet."""
