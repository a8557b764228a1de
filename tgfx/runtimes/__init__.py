"""Runtimes that a model may end up in, tried for real: does it load, does it compute the same, how fast is it."""
