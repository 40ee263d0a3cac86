"""OpenLineage: which data a run reads and writes, for a lineage backend.

Configured as OpenLineage says (OPENLINEAGE_URL, OPENLINEAGE_CONFIG, openlineage.yml); without that nothing is made.
"""
