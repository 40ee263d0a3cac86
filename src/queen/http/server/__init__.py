"""HTTP/1.1 and WebSocket on a bare transport: connections, requests, routing. Knows nothing of queues."""
