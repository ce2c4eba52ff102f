"""A corpus of silent training bugs with fixed twins, and of runs that are unusual but right."""
