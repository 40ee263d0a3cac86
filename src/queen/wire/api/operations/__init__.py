"""Operations: maintenance modes, cluster, system, audit log, health."""
