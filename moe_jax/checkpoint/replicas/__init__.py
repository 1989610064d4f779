"""Safety copies: replicas of the training state in the memory of other nodes."""
