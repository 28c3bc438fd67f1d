"""What a run leaves in its folder: log, checkpoints, and an inbox for budgets that change."""
