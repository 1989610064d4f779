"""File writes that are atomic, and a reader with limits for untrusted files."""
