"""Commands: what a user types, read and handed to the packages that do it. Only this package may import all others."""
