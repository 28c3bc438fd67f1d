"""A plan becomes a training: settings applied, the budget held and proven, everything put back afterwards."""
