"""The mesh, the table of shardings, and every collective."""
