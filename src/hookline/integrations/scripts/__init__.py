"""Scripts of others: hooks in whatever a script trains, without a change of it (`hookline run`)."""
