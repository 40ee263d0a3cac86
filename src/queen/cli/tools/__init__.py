"""Commands that are programs of their own: manifests, live views, benchmarks, checks, backups, imports."""
