"""In front of several shards: every request goes to the shards it is about, and their answers are made one."""
