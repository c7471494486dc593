"""Other data movers, the project's goals, and what the hixl transport adds to the library beneath it."""
