"""The live page of a run: a server of its own that reads the run's log and leaves new budgets in its inbox."""
