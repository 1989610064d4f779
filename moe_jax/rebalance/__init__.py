"""Which rank holds which expert: plans for moving and copying experts, and the transfer."""
