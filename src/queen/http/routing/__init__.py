"""How routes are declared, placed on shards, bound to handlers and described; knows no resource."""
