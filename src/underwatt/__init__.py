"""Train as fast as a power budget allows."""
