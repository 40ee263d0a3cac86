"""Common parts of the commands: the command tree, the server in use, output, times, and the file of contexts."""
