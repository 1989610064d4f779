"""WHERE: the mesh, the sharding table, and every collective."""
