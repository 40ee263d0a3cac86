"""The log: segments of messages, appended by pushes and published from stages, each message once."""
