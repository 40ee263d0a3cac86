"""Moving queues and topics from shard to shard while they are used."""
