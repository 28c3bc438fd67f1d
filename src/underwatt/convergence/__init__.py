"""How many samples a job needs to reach its target, by batch size: real runs, and a curve through few of them."""
