"""Learning to a budget: what closing a gate costs, which gates to close, when, and the loops around it."""
