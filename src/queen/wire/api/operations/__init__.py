"""What operators do: maintenance modes, cluster, system, audit log, health."""
