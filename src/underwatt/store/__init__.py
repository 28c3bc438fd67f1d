"""What lasts: measurements, convergence runs and plans in one SQLite file, and taking them elsewhere."""
