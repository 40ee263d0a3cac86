"""Writing: rows are staged by tasks and published once by the driver."""
