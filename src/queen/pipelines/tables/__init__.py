"""Tables in the open formats Delta Lake and Apache Iceberg: rows are appended or merged, batch by batch, each once."""
