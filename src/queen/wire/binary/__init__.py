"""Binary bodies of newer clients: pushes, transactions and the answers of pops."""
