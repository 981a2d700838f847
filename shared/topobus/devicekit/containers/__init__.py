"""Container formats on this host: CDI files on disk, and what an OCI spec needs to know of it."""
