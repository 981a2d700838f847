"""The commands of `topobus`, one module per topic. Each is loaded only when it runs."""
