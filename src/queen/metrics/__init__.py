"""Counting what a worker does, and letting the other workers of its host know."""
