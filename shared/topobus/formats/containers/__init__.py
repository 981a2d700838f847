"""What container runtimes read: CDI files and OCI specs."""
