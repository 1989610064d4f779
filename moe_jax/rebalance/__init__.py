"""Rebalancing of experts over ranks: plans for moving and replicating experts, and the transfer itself."""
