"""A pipelined training step: all stages run one program, and each stage runs the passes that a table of ticks lists for
it.
"""
