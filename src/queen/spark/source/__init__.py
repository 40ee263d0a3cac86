"""Reading: logs of shards and servers as Arrow columns, in batches and streams."""
