"""Loop, and what it has: event context, requests, ranks, record, state and checkpoints."""
