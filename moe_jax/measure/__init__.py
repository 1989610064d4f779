"""Measurements of this machine and analysis of compiled programs: overlap, estimated times, traces, microbenchmarks,
provenance.
"""
