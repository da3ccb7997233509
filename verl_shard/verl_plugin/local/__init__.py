"""verl's workers, data and algorithms in this process, without Ray: what the local PPO loop is made of."""
