"""The dashboard: files that were built from `dashboard/`, served by every worker."""

from queen.dashboard.files import Dashboard

__all__ = ["Dashboard"]
