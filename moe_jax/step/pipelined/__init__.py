"""A pipelined training step: all stages run one program, each what a table of ticks says."""
