"""The commands: each parses its command line and calls other packages. Only this package may import all others."""
