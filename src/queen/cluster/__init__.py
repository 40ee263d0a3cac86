"""Waking other workers. Carries bytes; what they mean is the broker's business."""
