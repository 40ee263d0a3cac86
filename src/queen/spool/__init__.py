"""Fsynced append-only files for pushes that PostgreSQL cannot take now."""
