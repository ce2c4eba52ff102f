"""What every loop shares: event context, model watch, control requests, means, random state."""
