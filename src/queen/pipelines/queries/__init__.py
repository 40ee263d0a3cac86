"""Streaming queries of a pipeline: which there are, what they compute, what they write, and how far they are."""
